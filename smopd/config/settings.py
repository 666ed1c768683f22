"""The settings of a recipe, as typed sections. This module does not import torch.

A recipe is a YAML file with the sections of `Settings`, the last class here. `runs` lists the training runs
in order. A run uses the recipe's settings, overridden by the run's `set`. The defaults are ours. The paper's
values are in the recipes. rules.py checks combinations of settings.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from smopd.engine import settings as engines
from smopd.engine.settings import Dtype, ImportPath, Section, TrainSettings, Vllm, WeightTransport
from smopd.names import ENVIRONMENT_THREADS, STARTUP_SECONDS, is_url

TRAINING_SECONDS = 300.0
"""Ours: the longest wait for another rank's part of a step, unless rewards or servers may take longer."""


class Model(Section):
    """The base model: a path, a hub id, or a function that builds it."""

    path: str | None = None
    """A causal language model with its tokenizer: a folder, a hub id, or a short name (see `smopd data`)."""
    factory: ImportPath | None = None
    """`package.module:function` that returns (model, tokenizer). It is called with `seed` and `kwargs`."""
    kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments of the factory."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model or teacher. If false, models that need it are refused."""


class Source(Section):
    """Rows of prompts: jsonl, json, parquet, csv or arrow files, a folder, a hub id, or a function."""

    source: str
    """A file, file pattern, folder (of files or save_to_disk), hub id, or `package.module:function`."""
    map: ImportPath | None = None
    """`package.module:function` that returns a new row, or None to drop the row."""
    kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments of the function in `source` or of load_dataset, such as {split: "test[:100]"}."""


class Data(Section):
    """Training and evaluation prompts."""

    train: Source
    evaluation: Source | None = None
    prompt_column: str = "prompt"
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Arguments of the chat template, e.g. {enable_thinking: false}. A row's own arguments override them."""
    max_prompt_tokens: int = Field(default=2048, ge=1)
    """Maximum tokens of a prompt, including the chat template."""
    overlong: Literal["drop", "truncate_left", "error"] = "drop"
    """What to do with a prompt that is too long. For evaluation prompts, drop means error."""
    max_evaluation_tokens: int | None = Field(default=None, ge=1)
    """Like max_prompt_tokens, but for evaluation prompts. null means max_prompt_tokens."""


class Reward(Section):
    """A reward dimension: a sync or async function for SMOPD, TRL, verl or verifiers (docs/extending.md)."""

    name: str
    function: ImportPath
    """`f(prompts, completions, **columns)`, returning a float or None per completion, or a factory of `f`."""
    weight: float = 1.0
    """Weight of this dimension in the advantages, unless the run has reward_weights."""
    range: tuple[float, float] | Literal["batch"] | None = None
    """The range [lo, hi] for gates and `saw`. `batch` means the minimum and maximum of each rollout batch."""
    kwargs: dict[str, Any] = Field(default={})
    """Extra keyword arguments of each call, or of the factory. They override columns of the same name."""
    completions: Literal["text", "messages"] | None = None
    """How to pass a completion to a chat: as text, or as TRL's [{role: assistant, content: TEXT}]. null means
    `messages` if the function's first argument is `completions`, else `text`."""


class Scoring(Section):
    """Limits on rewards."""

    deadline_seconds: float = Field(default=60.0, gt=0)
    """Time limit of one call of one reward. A worker that exceeds the limit is killed."""
    max_unscorable_share: float = Field(default=0.5, ge=0, le=1)
    """Stop the run when a reward leaves more than this share of responses unscored, in the last ten steps or
    an evaluation. If the share is below 1, also stop when a reward fails on all responses of the first step
    or, before training, on both the first prompt's ground truth and an empty answer."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Limit on the address space of each reward or environment process (GiB). Reserved memory counts too."""
    special_tokens: bool = True
    """Keep special tokens such as `<think>` in the text for rewards. A response's end token is never kept."""


class WarmStart(Section):
    """Supervised training on demonstrations before the first run."""

    source: Source
    completion_column: str = "completion"
    steps: int = Field(default=200, ge=1, le=10**9)
    batch_size: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=1e-5, gt=0)
    """Tune it. Our recipes use 2e-4 for 135 million parameters, and 3e-3 for 0.14 million."""
    warmup_steps: int = Field(default=10, ge=0)
    decay_share: float = Field(default=0.3, ge=0, le=1)
    """Share of the steps, counted from the end, during which the learning rate falls linearly to zero."""


class Advantage(Section):
    """Advantages from rewards (Eq. 1 to 4)."""

    estimator: Literal["auto", "grpo", "gdpo", "gd2po", "batch_balanced", "saw", "dvao"] | ImportPath = "auto"
    """A name, or a function with the signature of `Estimator` in smopd/advantages.py. `auto` means
    batch_balanced for `train` runs. For teachers and students, it means gdpo, as in the paper."""
    whiten: Literal["responses", "tokens", "none"] = "responses"
    """What the advantages are whitened over (Eq. 3). GRPO and DVAO do not whiten."""
    snr_threshold: float | None = Field(default=None, gt=0, le=1)
    """GD2PO: drop conflicting rollouts below this signal-to-noise ratio. null drops them all (GD2PO-Hard)."""


class Loss(Section):
    """The policy-gradient loss (Eq. 8)."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    clip_high: float = Field(default=0.2, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    entropy_coef: float = Field(default=0.0, ge=0)
    anchor_coef: float = Field(default=1.0, ge=0)
    """Weight of the policy-gradient term: 1 as in the paper, 0 for distillation alone."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    old_logps: Literal["recompute", "rollout"] = "recompute"
    """Old log-probabilities of the ratio: recompute before the first update, or use the rollouts' own."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Upper limit of importance weights between trainer and rollout engine. If null, they are not used."""


class Gate(Section):
    """Teacher weights (Eq. 18 to 21)."""

    kind: Literal["uniform", "sequence", "token"] = "uniform"
    floor: float = Field(default=0.2, ge=0, le=1)
    """phi, the minimum weight of a teacher."""


class Opd(Section):
    """On-policy distillation from the teachers (Eq. 5 to 7, 15 to 17)."""

    coef: float = Field(default=1.0, ge=0)
    """lambda at the first step."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_coef: float = Field(default=0.0, ge=0)
    """lambda after `decay_steps`, for the linear and cosine schedules."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Number of steps over which lambda changes. If null, it changes over the whole run."""
    kappa: int = Field(default=16, ge=1, le=128)
    """Number of each teacher's top tokens from which the target is made."""
    target: Literal["pooled", "merged"] | ImportPath = "pooled"
    """`pooled` has one entry per teacher and token, as in the paper. `merged` adds up the probabilities of
    equal tokens. A function must have the signature of `MakesTarget` in smopd/objective.py."""
    tail: bool = False
    """Add one more entry to the forward KL: the probability of all other tokens."""
    divergence: Literal["forward_kl", "reverse_kl_sampled"] = "forward_kl"
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of teachers and student in the forward KL. The reverse KL uses rollout.temperature."""
    gate: Gate = Gate()

    @property
    def sampled(self) -> bool:
        """Whether the divergence is the reverse KL on the sampled tokens (Eq. 15 to 17)."""
        return self.divergence == "reverse_kl_sampled"


class Loop(Section):
    """Length of a run and size of its steps."""

    steps: int = Field(default=100, ge=0, le=10**9)
    prompts_per_step: int = Field(default=64, ge=1, le=10**6)
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates per step. The prompts of a step are split into this many mini-batches."""
    async_level: Literal[0, 1] = 0
    """If 1, sample the next batch during the current update, with the policy from before that update."""
    timeout_seconds: float = Field(default=300.0, ge=1)
    """End the run when a rank is silent for this long, because it is suspended or its host is unreachable."""


class EvaluationSettings(Section):
    """Evaluation on held-out prompts."""

    samples: int = Field(default=1, ge=0)
    """Number of responses per prompt to sample at temperature 1, in addition to one greedy response."""
    every: int = Field(default=0, ge=0)
    """Steps between greedy evaluations during a run. If 0, only the finished run is evaluated."""


class Checkpoint(Section):
    """Checkpoints of a run."""

    every: int = Field(default=50, ge=0)
    """Steps between checkpoints. If 0, one is written only when a signal or an error ends the run."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""


class Log(Section):
    """Records of a run."""

    samples_per_step: int = Field(default=2, ge=0)
    """Number of responses per step to write to samples.jsonl."""
    token_views: int = Field(default=4, ge=0)
    """Number of evenly spaced steps whose samples are written to tokens.jsonl with teachers' top tokens."""
    trackers: list[Literal["mlflow", "swanlab", "tensorboard", "trackio", "wandb"] | ImportPath] = Field(
        default=[]
    )
    """Where to send metrics: names, or functions with the signature of `OpensTracker` in
    smopd/record/trackers.py."""
    profile: int | None = Field(default=None, ge=1)
    """Step to profile. A Chrome trace of each rank (for ui.perfetto.dev) is written to the run folder."""

    def view_every(self, steps: int) -> int:
        """Return the number of steps between two token views, or 0 for no views."""
        return math.ceil(steps / self.token_views) if self.token_views else 0


class TeacherVllm(Vllm):
    """vLLM engines of the teachers."""

    engines: int | None = Field(default=None, ge=1)
    """Number of engines. null means one per teacher, or one per base model of LoRA teachers. With fewer
    engines, teachers of one architecture share an engine, which reloads weights from disk every step."""


class RolloutSettings(Section):
    """Sampling of responses to train on."""

    engine: Literal["local", "vllm"] = "local"
    vllm: Vllm = Vllm()
    urls: list[str] = Field(default=[])
    """vLLM servers to sample from, instead of an engine on this machine."""
    transfer: WeightTransport = "files"
    """How to send new weights to an engine in another process. `files` uses shared memory or, for servers,
    SMOPD_TRANSFER_FOLDER, a folder with the same path on all hosts. `inline` uses the request body."""
    group_size: int = Field(default=8, ge=1, le=10**6)
    """G, the number of rollouts per prompt."""
    resample: int = Field(default=0, ge=0)
    """Dynamic sampling: replace each prompt of a step whose responses have equal scores in every reward.
    Repeat this until no such prompt is left, but at most this many times per step."""
    temperature: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=1024, ge=1, le=10**9)
    max_batch_tokens: int = Field(default=262_144, ge=1)
    """Local engine: maximum positions in the KV cache. Larger batches are sampled in several passes."""
    dtype: Dtype = "float32"
    environment: Literal["trl", "verifiers"] | ImportPath | None = None
    """The environment that answers responses in conversations (docs/multi_turn.md): a class with the methods
    of `Environment` in smopd/rewards/environments.py. `trl` and `verifiers` adapt environments for these."""
    environment_kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments of the environment's class."""
    environment_seconds: float = Field(default=60.0, gt=0)
    """Time limit of each answer of the environment."""
    turns: int = Field(default=8, ge=1)
    """Maximum number of responses in a conversation. max_new_tokens limits each response."""
    conversation_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of a conversation after its first prompt. null means (2 * turns - 1) * max_new_tokens. A
    conversation ends when fewer than max_new_tokens are left."""

    @property
    def longest_response(self) -> int:
        """Maximum tokens after a prompt."""
        if self.environment is None:
            return self.max_new_tokens
        return self.conversation_tokens or (2 * self.turns - 1) * self.max_new_tokens

    @property
    def colocated(self) -> bool:
        """Whether vLLM runs in the training process."""
        return self.engine == "vllm" and not self.urls and self.vllm.placement == "colocated"


class Teacher(Section):
    model: str
    """A run of this recipe, a path, a hub id, a LoRA adapter folder, or comma-separated server URLs."""
    reward: str
    """The reward that this teacher was trained for."""


class Teachers(Section):
    """The models that a run of stage merge combines."""

    engine: Literal["local", "vllm"] = "local"
    vllm: TeacherVllm = TeacherVllm()
    models: list[Teacher] = Field(default=[])
    dtype: Dtype = "float32"

    @property
    def colocated(self) -> bool:
        """Whether vLLM runs in the training process."""
        return self.engine == "vllm" and self.vllm.placement == "colocated"


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"got {value!r}, expected a regular expression ({error})") from None
    return value


class MergedModel(Section):
    """A model to merge. Its task vector, which is its difference from the run's `init`, is added."""

    model: str
    """An earlier run of this recipe, a path, a hub id, or a LoRA adapter folder."""
    keep: list[Annotated[float, Field(gt=0, le=1)]] = Field(default=[1.0], min_length=1)
    """Share of each tensor's changes to keep, largest magnitudes first. The guard tries every given value."""
    exclude: list[Annotated[str, AfterValidator(_pattern)]] = Field(default=[""], min_length=1)
    """Regular expression of tensor names to leave unchanged, such as `self_attn|embed`. If it is empty, all
    tensors may change. The guard tries every given value."""
    reward: str | None = None
    """Guard: the reward that this model was trained for."""
    max_regression: float | None = Field(default=None, ge=0)
    """Guard: reject a merge that loses more than this share of this model's gain in `reward`, unless null."""


class Guard(Section):
    """Selection of the best merge by rollouts on training prompts, before the first step."""

    prompts: int = Field(default=64, ge=1)
    samples: int = Field(default=8, ge=1)
    """Number of responses per prompt and candidate."""


class Merge(Section):
    """How a run of stage merge combines its teachers."""

    method: Literal["weights", "published"] = "weights"
    """`weights` starts from merged weights and trains without teachers. `published` distills the mixture of
    the teachers, as in the paper."""
    models: list[MergedModel] = Field(default=[])
    """Models to merge with method `weights`. Empty means every teacher, with the guard's default choices."""
    guard: Guard | None = Guard()
    """How method `weights` finds the best merge to start from. If null, use the only merge, untested."""

    def choices(self) -> int:
        return math.prod(len(each.keep) * len(each.exclude) for each in self.models)


class KlRef(Section):
    """KL to the initial policy of the run, estimated on the sampled tokens."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of this KL in the loss. If 0, no reference model is loaded."""


Stage = Literal["specialize", "merge", "train"]

SHARED = (
    "name", "description", "seed", "processes", "output", "model", "data", "rewards", "scoring", "warm_start",
    "evaluation", "runs",
)  # fmt: skip
"""Settings that a run's `set` cannot change."""


class RunSettings(Section):
    """One training run."""

    stage: Stage
    """`specialize` trains a teacher, `merge` a student of teachers, `train` a baseline or another model."""
    init: str = "base"
    """The model to start from: `base`, or the name of an earlier run."""
    reward_weights: list[float] | None = None
    """One weight per reward. null means the weights in `rewards`."""
    label: str | None = None
    """Row label in result tables."""
    reproduces: str | None = None
    """The row of a published table that this run reproduces. `--list` shows it."""
    set: dict[str, Any] = Field(default={})
    """Settings that override the recipe's settings in this run, nested as in the recipe."""


class Settings(Section):
    """All settings of `smopd train`."""

    name: str = Field(pattern=r"^\w[\w.-]*$")
    """Name of the experiment: letters, digits, '_', '-' and '.'."""
    description: str = ""
    """Caption of the result table."""
    seed: int = Field(default=0, ge=0, lt=2**62)
    """Seed of every random draw."""
    processes: int = Field(default=1, ge=1, le=256)
    """Number of local ranks to start. Ignored under torchrun."""
    output: str = "runs/{name}"
    """Run directory. {name} is replaced by the name of the experiment."""
    model: Model
    data: Data
    rewards: list[Reward] = Field(min_length=1)
    """The reward dimensions."""
    scoring: Scoring = Scoring()
    warm_start: WarmStart | None = None
    rollout: RolloutSettings = RolloutSettings()
    advantage: Advantage = Advantage()
    loss: Loss = Loss()
    opd: Opd = Opd()
    teachers: Teachers = Teachers()
    merge: Merge = Merge()
    kl_ref: KlRef = KlRef()
    student: TrainSettings = TrainSettings()
    loop: Loop = Loop()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    runs: dict[str, RunSettings] = Field(min_length=1)
    """The training runs, in order."""

    @property
    def kl_temperature(self) -> float:
        """Temperature of teachers and student in the KL. The reverse KL uses the rollouts' temperature."""
        return self.rollout.temperature if self.opd.sampled else self.opd.temperature

    @property
    def waiting_seconds(self) -> float:
        """Longest wait for another rank, with room for slow rewards, conversations and servers."""
        taught = [each.model for each in self.teachers.models]
        urls = [*self.rollout.urls, *filter(is_url, taught)]
        servers = len(",".join(urls).split(",")) if urls else 0
        reward = 2 * self.scoring.deadline_seconds + STARTUP_SECONDS  # a second try restarts the worker
        alone = max(reward, engines.REQUEST_SECONDS * (servers + 1) if servers else 0.0)
        if self.rollout.environment is not None:
            batches = math.ceil(self.loop.prompts_per_step * self.rollout.group_size / ENVIRONMENT_THREADS)
            alone += STARTUP_SECONDS + (self.rollout.turns * batches + 1) * self.rollout.environment_seconds
        return max(TRAINING_SECONDS, alone + 60.0)

    @property
    def longest_sequence(self) -> int:
        """Maximum tokens of a prompt with its response, in training and evaluation."""
        longest_prompt = max(self.data.max_prompt_tokens, self.data.max_evaluation_tokens or 0)
        return longest_prompt + self.rollout.longest_response

    @field_validator("output")
    @classmethod
    def _with_the_name(cls, value: str, info: ValidationInfo) -> str:
        if "{" in (rest := value.replace("{name}", "")) or "}" in rest:
            raise ValueError(f"got {value!r}, expected a folder with no braces but {{name}}")
        try:
            return str(Path(value.replace("{name}", info.data.get("name", ""))).expanduser())
        except RuntimeError as error:  # no such user
            raise ValueError(str(error)) from None

    def resolved(self, run_name: str) -> Settings:
        """Return the recipe's settings, overridden by the run's `set`. Raise ValidationError if invalid."""
        run = self.runs[run_name]
        own = merged(self.model_dump(), run.set)
        if own["advantage"]["estimator"] == "auto":
            own["advantage"]["estimator"] = "batch_balanced" if run.stage == "train" else "gdpo"
        return Settings.model_validate(own)

    def weights(self, run_name: str) -> list[float]:
        return self.runs[run_name].reward_weights or [reward.weight for reward in self.rewards]


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `base`, updated recursively by `over`. Lists are replaced, not merged."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result
