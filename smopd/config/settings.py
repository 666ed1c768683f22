"""The settings of a run: typed sections, without torch. Field by field here; what goes together in rules.py.

A recipe is a YAML file with these sections; `Settings` at the end is the whole. `runs` names the policy
optimisations of the recipe in order; each is the recipe's settings with its own `set` merged over them
(`Settings.resolved`). Defaults are ours; what the paper states stands in the recipes.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from smopd.engine.settings import (
    REQUEST_SECONDS,
    Dtype,
    ImportPath,
    Section,
    TrainSettings,
    Vllm,
    WeightTransport,
)
from smopd.names import STARTUP_SECONDS, is_url

TRAINING_SECONDS = 300.0
"""Ours: the longest time that a process waits for another one within a step, before the run fails."""


class Model(Section):
    """Where the base model comes from: a path or hub id, or a factory that makes a small one."""

    path: str | None = None
    """Folder, short name (python -m smopd.data) or hub id of a causal language model with its tokenizer."""
    factory: ImportPath | None = None
    """`package.module:function`, called with `seed` and `kwargs`; returns (model, tokenizer)."""
    kwargs: dict[str, Any] = Field(default={})


class Source(Section):
    """Rows of prompts: a jsonl, json or parquet file, a hub id, or `package.module:function`."""

    source: str
    map: ImportPath | None = None
    """`package.module:function`: row -> row, or None to drop it."""
    kwargs: dict[str, Any] = Field(default={})
    """Of the function, or of datasets.load_dataset ({split: "test[:100]"})."""


class Data(Section):
    """Training and evaluation prompts, and how they become chats."""

    train: Source
    evaluation: Source | None = None
    prompt_column: str = "prompt"
    max_prompt_tokens: int = Field(default=2048, ge=1)
    """With the chat template."""
    overlong: Literal["drop", "truncate_left", "error"] = "drop"
    """What becomes of a longer training prompt. Evaluation prompts are never dropped."""
    max_evaluation_tokens: int | None = Field(default=None, ge=1)
    """Of an evaluation prompt; null is max_prompt_tokens. A longer one is an error, or truncated too."""


class Reward(Section):
    """One reward dimension: `f(prompts, completions, **columns) -> list of float or None`, sync or async."""

    name: str
    function: ImportPath
    """`package.module:function`."""
    weight: float = 1.0
    """Weight of this dimension in the advantages of a run that names none."""
    range: tuple[float, float] | Literal["batch"] | None = None
    """[lo, hi] for the gates; `batch` takes the rollout batch's own minimum and maximum."""
    kwargs: dict[str, Any] = Field(default={})
    """Further keyword arguments of each call; they win over columns of the same name."""


class Scoring(Section):
    """How long a reward may take, and how much it may miss."""

    deadline_seconds: float = Field(default=60.0, gt=0)
    """Longest time one call of one reward may take; then its worker is killed."""
    max_unscorable_share: float = Field(default=0.5, ge=0, le=1)
    """The run stops when a dimension could not score more than this share of the responses of the last ten
    steps, or of an evaluation; a bad call among good ones is counted and costs no run."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Most address space of each reward's process, GiB; what its libraries reserve counts too."""


class WarmStart(Section):
    """Supervised steps on demonstrations before any reinforcement."""

    source: Source
    completion_column: str = "completion"
    steps: int = Field(default=200, ge=1)
    batch_size: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=10, ge=0)
    decay_share: float = Field(default=0.3, ge=0, le=1)
    """The learning rate falls linearly to zero over this last share of the steps."""


class Advantage(Section):
    """From the rewards of a group to one advantage a response (Eq. 1 to 4)."""

    estimator: Literal["grpo", "gdpo", "gd2po", "batch_balanced", "saw", "dvao"] | ImportPath = "gdpo"
    """How several rewards become one advantage, or a function with the signature of `Estimator` in
    smopd/advantages.py."""
    whiten: Literal["responses", "tokens", "none"] = "responses"
    """What the advantages are whitened over (Eq. 3). GRPO and DVAO are not whitened."""
    snr_threshold: float | None = Field(default=None, gt=0, le=1)
    """GD2PO: drop a conflicting rollout only below this signal-to-noise ratio; None is GD2PO-Hard."""


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


class Gate(Section):
    """Teacher weights (Eq. 18 to 21)."""

    kind: Literal["uniform", "sequence", "token"] = "uniform"
    floor: float = Field(default=0.2, ge=0, le=1)
    """phi, the least weight of a teacher."""


class Product(Section):
    """merge.method product: a reference times what each teacher changed of it (ours)."""

    reference: str = "init"
    """`init` is what the teachers started from, where they are runs of this recipe, else its base; or a run,
    a path or a hub id, and where the teachers are at URLs its servers' URLs."""
    weights: list[float] | None = None
    """Of each teacher's change; null is 1 each. A gate multiplies them by its weights over uniform ones."""
    protect_above: float | None = Field(default=None, ge=0)
    """A token raised by a teacher by more than this, its weight counted, is lowered by none; nats."""
    prefix_floor: float | None = Field(default=None, ge=0, le=1)
    """Where a teacher has turned away from the response, its changes weigh the share of the reference's way
    that it still went, at least this; null: 1 everywhere."""


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
    target: Literal["pooled", "merged"] | ImportPath = "pooled"
    """The mixture of the teachers, where a token that several of them name is an entry for each (pooled), or
    one; or a function as `MakesTarget` of smopd/objective.py has it."""
    product: Product = Product()
    tail: bool = False
    """Whether the forward KL counts what the teachers leave to all other tokens as one more entry."""
    divergence: Literal["forward_kl", "reverse_kl_sampled"] = "forward_kl"
    temperature: float = Field(default=1.0, gt=0)
    """Of both sides of the forward KL; the sampled reverse KL is at the rollouts'."""
    gate: Gate = Gate()

    @property
    def sampled(self) -> bool:
        """Whether the divergence is the reverse KL on sampled tokens (Eq. 15 to 17)."""
        return self.divergence == "reverse_kl_sampled"


class Loop(Section):
    """The length of a run and the size of its steps."""

    steps: int = Field(default=100, ge=0)
    prompts_per_step: int = Field(default=64, ge=1)
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer steps a batch: the batch of prompts is cut into this many mini-batches."""
    async_level: Literal[0, 1] = 0
    """1 samples the next batch while this one trains, with the policy before its update."""


class EvaluationSettings(Section):
    """What is measured on held-out prompts, greedy and sampled."""

    samples: int = Field(default=1, ge=0)
    """Responses a prompt sampled at temperature 1, beside the greedy one."""
    every: int = Field(default=0, ge=0)
    """Greedy evaluation every so many steps during a run; 0 only at its end."""


class Checkpoint(Section):
    """What a killed run resumes from."""

    every: int = Field(default=50, ge=0)
    """Steps between checkpoints; 0 keeps none."""
    keep: int = Field(default=2, ge=1)


class Log(Section):
    """What is written and shown along the way."""

    samples_per_step: int = Field(default=2, ge=0)
    token_views: int = Field(default=4, ge=0)
    """How often over a merge the samples are written token by token, at even distances to the last step."""
    trackers: list[Literal["tensorboard", "trackio", "wandb"] | ImportPath] = Field(default=[])
    """What gets the metrics too; or a function as `OpensTracker` of smopd/record/trackers.py has it."""

    def view_every(self, steps: int) -> int:
        """Steps between two token views; 0 for none."""
        return math.ceil(steps / self.token_views) if self.token_views else 0


class TeacherVllm(Vllm):
    """As `Vllm`, and how many engines there are."""

    engines: int | None = Field(default=None, ge=1)
    """That the teachers' models share; null is one each. With fewer, models of one architecture take turns in
    an engine, and the weights of each are read from its files once a step, and with `union` twice."""


class RolloutSettings(Section):
    """Sampling of the responses that a step learns from."""

    engine: Literal["local", "vllm"] = "local"
    vllm: Vllm = Vllm()
    urls: list[str] = Field(default=[])
    """vLLM servers on other hosts, which sample instead of an engine here, in a dtype of their own."""
    transfer: WeightTransport = "files"
    """How new weights reach an engine outside this process. files: in shared memory, for servers in
    SMOPD_TRANSFER_FOLDER, which each reads under the same path; inline: in the requests to servers."""
    group_size: int = Field(default=8, ge=1)
    """G, rollouts per prompt."""
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int = Field(default=1024, ge=1)
    max_batch_tokens: int = Field(default=262_144, ge=1)
    """Local engine: most key-value cache positions held at once; more responses are sampled in turns."""
    dtype: Dtype = "float32"

    @property
    def colocated(self) -> bool:
        """Whether vLLM samples inside the training process."""
        return self.engine == "vllm" and not self.urls and self.vllm.placement == "colocated"


class Teacher(Section):
    model: str
    """A run of this recipe, a path or hub id, a LoRA adapter's folder, or its servers' URLs (with commas)."""
    reward: str
    """The reward dimension that this teacher stands for."""


class Teachers(Section):
    """The models that a run of the stage merge combines."""

    engine: Literal["local", "vllm"] = "local"
    vllm: TeacherVllm = TeacherVllm()
    union: bool = False
    """Every teacher's value on every teacher's top-kappa ids, not on its own alone."""
    models: list[Teacher] = Field(default=[])
    dtype: Dtype = "float32"

    @property
    def colocated(self) -> bool:
        """Whether vLLM scores inside the training process."""
        return self.engine == "vllm" and self.vllm.placement == "colocated"


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"got {value!r}, expected a regular expression ({error})") from None
    return value


Share = Annotated[float, Field(gt=0, le=1)]
Pattern = Annotated[str, AfterValidator(_pattern)]


class MergedModel(Section):
    """A model whose change of the run's `init`, its task vector, goes into the sum."""

    model: str
    """An earlier run of this recipe, a path or hub id, or a LoRA adapter's folder."""
    keep: list[Share] = Field(default=[1.0], min_length=1)
    """The share of each tensor's changes that stays, the largest by magnitude; several are the guard's."""
    exclude: list[Pattern] = Field(default=[""], min_length=1)
    """Tensors whose names match this pattern stay as in `init` (self_attn|embed); several are the guard's,
    and an empty one excludes none."""
    reward: str | None = None
    """The guard: the reward dimension that this model stands for."""
    max_regression: float | None = Field(default=None, ge=0)
    """The guard: the largest share of this model's own gain in its reward, over `init`, that a merge may
    lack; null is any."""


class Guard(Section):
    """Rollouts of training prompts that choose among the merges before the first step."""

    prompts: int = Field(default=64, ge=1)
    samples: int = Field(default=8, ge=1)
    """Responses a prompt, of each candidate."""


class Merge(Section):
    """How a run of the stage `merge` combines its teachers."""

    method: Literal["weights", "product", "published"] = "weights"
    """weights: start from a merge of the teachers' weights, then train without them (recommended); product:
    distil the product of what they changed; published: distil their mixture, as in the paper."""
    models: list[MergedModel] = Field(default=[])
    """weights: what is merged; none given: each teacher, with the guard's usual choices."""
    rule: Literal["sum", "ties", "ram"] = "sum"
    """weights: the sum of the changes; ties: of each entry, the mean of those with the elected sign; ram: the
    mean of all that changed it."""
    guard: Guard | None = Guard()
    """weights: null takes the merge as it is given."""

    def choices(self) -> int:
        """How many merges there are to choose from."""
        return math.prod(len(each.keep) * len(each.exclude) for each in self.models)


class KlRef(Section):
    """KL to the policy that the run starts from, on the sampled tokens: a clipped term of the loss."""

    coef: float = Field(default=0.0, ge=0)


Stage = Literal["specialize", "merge", "train"]

SHARED = (
    "name", "description", "seed", "processes", "output", "model", "data", "rewards", "scoring", "warm_start",
    "evaluation", "runs",
)  # fmt: skip
"""What all runs of a recipe have in common."""


class RunSettings(Section):
    """One policy optimisation."""

    stage: Stage
    """specialize: a teacher; merge: a student of the teachers; train: neither, such as a baseline."""
    init: str = "base"
    """`base`, or the name of an earlier run, whose export this one starts from."""
    reward_weights: list[float] | None = None
    """The priority profile, one weight a reward; None takes the rewards' own."""
    label: str | None = None
    """The row's name in tables."""
    reproduces: str | None = None
    """Which row of which published table this is, for `--list`."""
    set: dict[str, Any] = Field(default={})
    """Settings that differ from the recipe's, nested as in the recipe."""


class Settings(Section):
    """All settings of `python -m smopd.train`."""

    name: str = Field(pattern=r"^\w[\w.-]*$")
    """What this experiment is called, with letters, digits, '_', '-' and '.'."""
    description: str = ""
    """What it shows; the caption of its table."""
    seed: int = Field(default=0, ge=0)
    """All random draws follow from it."""
    processes: int = Field(default=1, ge=1)
    """Local processes to start unless torchrun started this one; each holds a shard and samples its share."""
    output: str = "runs/{name}"
    """The run directory; {name} is the experiment's."""
    model: Model
    data: Data
    rewards: list[Reward] = Field(min_length=1)
    """The dimensions of the reward."""
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
    """The policy optimisations, in order."""

    @property
    def unites(self) -> bool:
        """Whether every teacher is asked about the ids of all, and the product's reference with them."""
        return self.teachers.union or self.merge.method == "product"

    @property
    def kl_temperature(self) -> float:
        """Of teachers and student in the KL; the sampled one compares with the policy that was sampled."""
        return self.rollout.temperature if self.opd.sampled else self.opd.temperature

    @property
    def waiting_seconds(self) -> float:
        """TRAINING_SECONDS, or what one process alone may wait for a reward or a server, and a minute."""
        scored = [*(each.model for each in self.teachers.models), self.opd.product.reference]
        urls = [*self.rollout.urls, *(1 + self.unites) * [model for model in scored if is_url(model)]]
        servers = len(",".join(urls).split(",")) if urls else 0  # of a union, asked twice
        reward = 2 * self.scoring.deadline_seconds + STARTUP_SECONDS  # a second try starts anew
        alone = max(reward, REQUEST_SECONDS * (servers + 1) if servers else 0.0)
        return max(TRAINING_SECONDS, alone + 60.0)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with its longest response, in training and evaluation."""
        longest_prompt = max(self.data.max_prompt_tokens, self.data.max_evaluation_tokens or 0)
        return longest_prompt + self.rollout.max_new_tokens

    @field_validator("output")
    @classmethod
    def _with_the_name(cls, value: str, info: ValidationInfo) -> str:
        if "{" in (rest := value.replace("{name}", "")) or "}" in rest:
            raise ValueError(f"got {value!r}, expected a folder in which only {{name}} stands in braces")
        try:
            return str(Path(value.replace("{name}", info.data.get("name", ""))).expanduser())
        except RuntimeError as error:  # no such user
            raise ValueError(str(error)) from None

    def resolved(self, run_name: str) -> Settings:
        """The settings of one run: the recipe's with the run's `set` merged over them.

        Raises:
            pydantic.ValidationError: `set` names what does not exist or is out of range.
        """
        return Settings.model_validate(merged(self.model_dump(), self.runs[run_name].set))

    def weights(self, run_name: str) -> list[float]:
        """The run's priority profile, one weight a reward."""
        return self.runs[run_name].reward_weights or [reward.weight for reward in self.rewards]


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the nested keys of `over` put in; lists are replaced whole."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result
