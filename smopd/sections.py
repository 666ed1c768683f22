"""The sections of a recipe that say what is learned: typed settings with their own checks. Loads no torch.

Defaults are ours; what the paper states stands in the recipes.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from smopd.names import IMPORT_PATH, REWARD_ARGUMENTS
from smopd.trackers import TrackerName


def _import_path(value: str) -> str:
    if not IMPORT_PATH.fullmatch(value):
        raise ValueError(f"got {value!r}, expected `package.module:function`")
    return value


ImportPath = Annotated[str, AfterValidator(_import_path)]


class Section(BaseModel):
    """A group of settings. The string under a setting is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind in (int, float, int | None, float | None):
            raise ValueError(f"got {str(value).lower()}, expected a number")
        return value


class Model(Section):
    """Where the base model comes from: a path or hub id, or a factory that makes a small one."""

    path: str | None = None
    """Local folder or hub id of a causal language model with its tokenizer."""
    factory: ImportPath | None = None
    """`package.module:function`, called with `seed` and `kwargs`; returns (model, tokenizer)."""
    kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.path is None) == (self.factory is None):
            raise ValueError("give exactly one of path and factory (and null for the other)")
        return self


class Source(Section):
    """Rows of prompts: a jsonl, json or parquet file, a short name (`python -m smopd.data`; it comes before
    a path and a hub id), a hub id, or `package.module:function`."""

    source: str
    split: str | None = None
    prompt_column: str = "prompt"
    map: ImportPath | None = None
    """`package.module:function`: row -> row, or None to drop it."""
    limit: int | None = Field(default=None, ge=1)
    kwargs: dict[str, Any] = {}


class Data(Section):
    """Training and evaluation prompts, and how they become chats."""

    train: Source
    evaluation: Source | None = None
    max_prompt_tokens: int = Field(default=2048, ge=1)
    """With the chat template."""
    overlong: Literal["drop", "truncate_left", "error"] = "drop"
    """What becomes of a longer training prompt. Evaluation prompts are never dropped."""
    max_evaluation_tokens: int | None = Field(default=None, ge=1)
    """Of an evaluation prompt; null is max_prompt_tokens. A longer one is an error, or truncated too."""
    system: str | None = None
    """A system message put before string prompts."""


class Reward(Section):
    """One reward dimension: `f(prompts, completions, **columns) -> list of float or None`, sync or async."""

    name: str
    function: ImportPath
    """`package.module:function`."""
    weight: float = 1.0
    """Weight of this dimension in the advantages of a run that names none."""
    range: tuple[float, float] | Literal["batch"] | None = None
    """[lo, hi] for the gates; `batch` takes the rollout batch's own minimum and maximum."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments of each call; they win over columns of the same name."""

    @model_validator(mode="after")
    def _kwargs_of_the_function(self) -> Reward:
        taken = [name for name in REWARD_ARGUMENTS if name in self.kwargs]
        if taken:
            raise ValueError(f"kwargs: got {', '.join(taken)}, which every call gives; expected other names")
        return self

    @model_validator(mode="after")
    def _ordered_range(self) -> Reward:
        if isinstance(self.range, tuple) and self.range[0] >= self.range[1]:
            raise ValueError(f"range: got {list(self.range)}, expected [lo, hi] with lo < hi")
        return self


class Scoring(Section):
    """How long a reward may take, and how much it may miss."""

    startup_seconds: float = Field(default=600.0, gt=0)
    """Longest time a reward may take to be imported, before anything is trained."""
    deadline_seconds: float = Field(default=60.0, gt=0)
    """Longest time one call of one reward may take; then its worker is killed."""
    max_unscorable_share: float = Field(default=0.5, ge=0, le=1)
    """The run stops when a dimension could not score more than this share of a step's responses."""


class WarmStart(Section):
    """Supervised steps on demonstrations before any reinforcement."""

    source: Source
    completion_column: str = "completion"
    max_tokens: int | None = Field(default=None, ge=1)
    """Longer demonstrations, prompt and answer together, are dropped and counted."""
    steps: int = Field(default=200, ge=1)
    batch_size: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=10, ge=0)
    decay_share: float = Field(default=0.3, ge=0, le=1)
    """The learning rate falls linearly to zero over this last share of the steps."""


class Advantage(Section):
    """From the rewards of a group to one advantage a response (Eq. 1 to 4)."""

    estimator: Literal["grpo", "gdpo", "gd2po"] = "gdpo"
    whiten: Literal["responses", "tokens", "none"] = "responses"
    """Over what GDPO and GD2PO whiten (Eq. 3); GRPO never does."""
    snr_threshold: float | None = Field(default=None, gt=0, le=1)
    """GD2PO: drop a conflicting rollout only below this signal-to-noise ratio; None is GD2PO-Hard."""
    norm_eps: float = Field(default=1e-6, ge=0)


class Loss(Section):
    """The policy-gradient anchor (Eq. 8)."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    clip_high: float = Field(default=0.2, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    entropy_coef: float = Field(default=0.0, ge=0)
    anchor_coef: float = Field(default=1.0, ge=0)
    """1 is the paper's objective, 0 is OPD alone."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    old_logps: Literal["recompute", "rollout"] = "recompute"
    """Denominator of the ratio: the training forward before the first update, or the rollout engine's own."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Truncated importance sampling between training and rollout policies; None leaves it out."""

    @model_validator(mode="after")
    def _one_correction(self) -> Loss:
        if self.importance_cap is not None and self.old_logps == "rollout":
            raise ValueError(
                "importance_cap: corrects recomputed old log-probabilities; old_logps is 'rollout', whose "
                "ratio holds the correction already"
            )
        return self


class Gate(Section):
    """Teacher weights (Eq. 18 to 21 and their constants)."""

    kind: Literal["uniform", "sequence", "token"] = "uniform"
    floor: float = Field(default=0.2, ge=0, le=1)
    confidence_exponent: float = Field(default=1.0, ge=0)
    failure_exponent: float = Field(default=1.0, ge=0)
    confidence_floor: float = Field(default=0.05, ge=0)
    blend: float = Field(default=0.5, ge=0, le=1)
    eps: float = Field(default=1e-6, gt=0)


class Opd(Section):
    """On-policy distillation from the teachers (Eq. 5 to 7, 15 to 17)."""

    coef: float = Field(default=1.0, ge=0)
    """lambda at the first step."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_coef: float = Field(default=0.0, ge=0)
    """lambda after `decay_steps`, for the linear and cosine schedules."""
    decay_steps: int | None = Field(default=None, ge=1)
    """None is the whole run."""
    kappa: int = Field(default=16, ge=1, le=128)
    support: Literal["pooled", "merged"] = "merged"
    """The forward KL's mixture: a token that several teachers name is an entry each, or one."""
    tail: bool = True
    """Whether the forward KL counts what the teachers leave to all other tokens as one more entry."""
    divergence: Literal["forward_kl", "reverse_kl_sampled"] = "forward_kl"
    reverse_kl_surrogate: Literal["paper", "ppo"] = "paper"
    temperature: float = Field(default=1.0, gt=0)
    """Of both sides of the forward KL; the sampled reverse KL is at the rollouts'."""
    watch: bool = True
    """Ask the teachers where lambda is 0 too, for the metrics alone."""
    gate: Gate = Gate()


class Loop(Section):
    """The length of a run and the size of its steps."""

    steps: int = Field(default=100, ge=0)
    prompts_per_step: int = Field(default=64, ge=1)
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer steps a batch: the batch of prompts is cut into this many mini-batches."""
    lag: Literal[0, 1] = 0
    """1 samples the next batch while this one trains, with the policy before its update."""

    @model_validator(mode="after")
    def _no_empty_mini_batch(self) -> Loop:
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"updates_per_step: got {self.updates_per_step}, "
                f"expected at most prompts_per_step ({self.prompts_per_step})"
            )
        return self


class Evaluation(Section):
    """What is measured on held-out prompts, greedy and sampled."""

    samples: int = Field(default=1, ge=0)
    """Sampled responses a prompt beside the greedy one."""
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    """None is the rollouts' own limit."""
    every: int = Field(default=0, ge=0)
    """Greedy evaluation every so many steps during a run; 0 only at its end."""


class Checkpoint(Section):
    """What a killed run goes on from."""

    every: int = Field(default=50, ge=0)
    """Steps between checkpoints; 0 keeps none."""
    keep: int = Field(default=2, ge=1)


class Log(Section):
    """What is written and shown along the way."""

    samples_per_step: int = Field(default=2, ge=0)
    token_views: int = Field(default=4, ge=0)
    """How often over a merge the samples are written token by token, at even distances to the last step."""
    plain: bool = False
    """Plain lines even where the output is a terminal."""
    to: list[TrackerName] = []
    """Trackers that get the metrics too."""

    def view_every(self, steps: int) -> int:
        """Steps between two token views; 0 for none."""
        return math.ceil(steps / self.token_views) if self.token_views else 0
