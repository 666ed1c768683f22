"""The settings of a run: typed, validated, and free of torch, so that a mistake is answered at once.

Long, but one page: a recipe is a YAML file with these sections, first those that say what is learned, then
those of the engines; `Settings` at the end is the whole. `runs` names the policy optimisations of the recipe
in order; each is the recipe's settings with its own `set` merged over them (`Settings.resolved`). Defaults
are ours; what the paper states stands in the recipes.

A check across settings raises a line for each mistake, `setting: what came, what was expected`, where the
setting's path begins at the section that checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from smopd.config.merging import Merge
from smopd.config.rules import contradictions
from smopd.engine.settings import Dtype, ImportPath, Section, TrainSettings, Vllm
from smopd.names import REWARD_ARGUMENTS, STARTUP_SECONDS, is_url

TRAINING_SECONDS = 300.0
"""Ours: the longest time that a process waits for another one within a step, before the run fails."""


class Model(Section):
    """Where the base model comes from: a path or hub id, or a factory that makes a small one."""

    path: str | None = None
    """Folder, short name (python -m smopd.data) or hub id of a causal language model with its tokenizer."""
    factory: ImportPath | None = None
    """`package.module:function`, called with `seed` and `kwargs`; returns (model, tokenizer)."""
    kwargs: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.path is None) == (self.factory is None):
            raise ValueError("give exactly one of path and factory (and null for the other)")
        return self


class Source(Section):
    """Rows of prompts: a jsonl, json or parquet file, a hub id, or `package.module:function`."""

    source: str
    map: ImportPath | None = None
    """`package.module:function`: row -> row, or None to drop it."""
    limit: int | None = Field(default=None, ge=1)
    kwargs: dict[str, Any] = Field(default={})
    """Of the function, or of datasets.load_dataset ({split: test})."""


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
    kwargs: dict[str, Any] = Field(default={})
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

    estimator: Literal["grpo", "gdpo", "gd2po"] | ImportPath = "gdpo"
    """Or a function as `Estimator` of smopd/advantages.py has it."""
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
    reverse_kl_surrogate: Literal["paper", "ppo"] = "paper"
    temperature: float = Field(default=1.0, gt=0)
    """Of both sides of the forward KL; the sampled reverse KL is at the rollouts'."""
    log_when_off: bool = True
    """Ask the teachers where lambda is 0 too, for the metrics alone."""
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

    @model_validator(mode="after")
    def _no_empty_mini_batch(self) -> Loop:
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"updates_per_step: got {self.updates_per_step}, "
                f"expected at most prompts_per_step ({self.prompts_per_step})"
            )
        return self


class EvaluationSettings(Section):
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


class RolloutVllm(Vllm):
    """As `Vllm`, and how it gets new weights."""

    transfer: Literal["files", "ipc"] = "files"
    """To a process of its own: files in shared memory, or CUDA's handles of memory on a GPU that both use."""


class TeacherVllm(Vllm):
    """As `Vllm`, and how many engines there are."""

    engines: int | None = Field(default=None, ge=1)
    """That the teachers' models share; null is one each. With fewer, models of one architecture take turns in
    an engine, and the weights of each are read from its files once a step, and with `union` twice."""


class RolloutSettings(Section):
    """Sampling of the responses that a step learns from."""

    engine: Literal["local", "vllm"] = "local"
    vllm: RolloutVllm = RolloutVllm()
    urls: list[str] = Field(default=[])
    """vLLM servers on other hosts, which sample instead of an engine here, in a dtype of their own."""
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


class Remote(Section):
    """How servers at URLs are asked."""

    deadline_seconds: float = Field(default=600.0, gt=0)
    """Of one request."""
    transfer: Literal["files", "inline"] = "files"
    """How new weights reach rollout servers: files in SMOPD_TRANSFER_FOLDER (where not set, in this host's
    memory), which every server reads under the same path, or inline in the requests."""


class KlRef(Section):
    """KL to a reference policy, on the sampled tokens; off at coef 0."""

    coef: float = Field(default=0.0, ge=0)
    place: Literal["loss", "reward"] = "loss"
    """loss: a clipped term of its own; reward: one more dimension, minus the response's KL."""
    model: str = "init"
    """`init` is what the run starts from; else a run of this recipe, a path or a hub id."""


Stage = Literal["specialize", "merge", "train"]

_NAME = re.compile(r"\w[\w.-]*")
_RUN_NAME = re.compile(r"\w[\w-]*")


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

    @model_validator(mode="after")
    def _set_belongs_to_the_run(self) -> RunSettings:
        whole = [key for key in SHARED if key in self.set]
        if whole:
            raise ValueError(f"set: {', '.join(whole)} cannot differ between runs")
        return self


class Settings(Section):
    """All settings of `python -m smopd.train`."""

    name: str
    """What this experiment is called."""
    description: str = ""
    """What it shows; the caption of its table."""
    seed: int = Field(default=0, ge=0)
    """All random draws follow from it."""
    processes: int = Field(default=1, ge=1)
    """Local processes to start unless torchrun started this one; each holds a shard and samples its share."""
    output: str = "runs/{name}"
    """The run directory."""
    model: Model
    data: Data
    rewards: list[Reward] = Field(min_length=1)
    scoring: Scoring = Scoring()
    warm_start: WarmStart | None = None
    rollout: RolloutSettings = RolloutSettings()
    advantage: Advantage = Advantage()
    loss: Loss = Loss()
    opd: Opd = Opd()
    teachers: Teachers = Teachers()
    merge: Merge = Merge()
    remote: Remote = Remote()
    kl_ref: KlRef = KlRef()
    student: TrainSettings = TrainSettings()
    loop: Loop = Loop()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    runs: dict[str, RunSettings] = Field(min_length=1)

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
        alone = max(reward, self.remote.deadline_seconds * (servers + 1) if servers else 0.0)
        return max(TRAINING_SECONDS, alone + 60.0)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with its longest response, in training and evaluation."""
        trained, new = self.data.max_prompt_tokens, self.rollout.max_new_tokens
        evaluated = self.data.max_evaluation_tokens or trained
        return max(trained + new, evaluated + (self.evaluation.max_new_tokens or new))

    @field_validator("name")
    @classmethod
    def _file_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(f"got {value!r}, expected letters, digits, '_', '-' and '.'")
        return value

    @field_validator("output")
    @classmethod
    def _only_the_name(cls, value: str) -> str:
        if re.search(r"[{}]", value.replace("{name}", "")):
            raise ValueError(f"got {value!r}, expected a folder in which only {{name}} stands in braces")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        rewards = [reward.name for reward in self.rewards]
        wrong = []
        if len(set(rewards)) != len(rewards):
            wrong.append(f"rewards: names must differ, got {rewards}")
        earlier = ["base"]
        for name, run in self.runs.items():
            if name == "base":
                wrong.append("runs.base: 'base' names the starting model; choose another name")
            elif not _RUN_NAME.fullmatch(name):
                wrong.append(f"runs.{name}: a run's name has letters, digits, '_' and '-' only")
            if run.init not in earlier:
                wrong.append(f"runs.{name}.init: {run.init!r} is no earlier run, expected one of {earlier}")
            if run.reward_weights is not None and len(run.reward_weights) != len(rewards):
                wrong.append(
                    f"runs.{name}.reward_weights: got {len(run.reward_weights)} weights, "
                    f"expected one for each of the rewards {rewards}"
                )
            earlier.append(name)
        teachers, gate = self.teachers.models, self.opd.gate
        for i, teacher in enumerate(teachers):
            if teacher.reward not in rewards:
                wrong.append(f"teachers.models.{i}.reward: {teacher.reward!r} is none of {rewards}")
        if gate.kind != "uniform":
            if gate.floor * len(teachers) > 1:
                wrong.append(f"opd.gate.floor: {gate.floor} times {len(teachers)} teachers exceeds 1")
            for i, reward in enumerate(self.rewards):
                if reward.range is None and any(teacher.reward == reward.name for teacher in teachers):
                    wrong.append(f"rewards.{i}.range: the gate needs [lo, hi] or batch for {reward.name!r}")
        weights = self.opd.product.weights
        if weights is not None and teachers and len(weights) != len(teachers):
            wrong.append(f"opd.product.weights: got {len(weights)}, expected {len(teachers)}, one a teacher")
        wrong += [f"merge.{line}" for line in self.merge.mistakes(rewards)]
        wrong += contradictions(self)
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    def resolved(self, run_name: str) -> Settings:
        """The settings of one run: the recipe's with the run's `set` merged over them, validated once.

        Raises:
            KeyError: no such run.
            pydantic.ValidationError: `set` names what does not exist or is out of range.
        """
        if run_name not in self._resolved:
            values = merged(self.model_dump(), self.runs[run_name].set)
            self._resolved[run_name] = Settings.model_validate(values)
        return self._resolved[run_name]

    @cached_property
    def _resolved(self) -> dict[str, Settings]:
        return {}  # no private attribute: pydantic compares those

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Settings:
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("_resolved", None)
        return copied

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
