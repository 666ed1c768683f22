"""`python -m smopd.plan RECIPE --gpus 8 --gpu-memory 80`: the memory of each run on each GPU.

Reads configs and loads no weights. Takes a recipe and any setting over it, as `smopd.train` does. Parameters,
gradients, AdamW's states, caches and vLLM engines (by the engines' own rule, engine/vllm/memory.py) are
counted; what an update adds is bounded from above, as if all of it were held at once. Not checked on a GPU.

Exit status 0: every run fits; 1: one does not; 2: a mistake.
"""

from __future__ import annotations

from smopd import extra  # noqa: F401 says what to install

# isort: split

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from smopd.config.cli import Selection, read_options, read_settings
from smopd.config.recipe import Mistakes
from smopd.config.schedule import BASE, distils, needs_base, product_reference, weight_merge
from smopd.config.settings import Settings
from smopd.names import is_url

if TYPE_CHECKING:
    from smopd.engine.models.sizes import ModelNumbers
    from smopd.engine.settings import Vllm

GIB = 1 << 30
TABLE_WIDTH = 132  # characters, where the output is no terminal
RUNNING = ("rollout", "teachers", "update")
COLUMNS = ("start", *RUNNING)
WIDTHS = {"float32": 4, "bfloat16": 2}
FP32, ADAMW = 4, 8  # bytes a parameter: a master or a gradient; AdamW's two moments
DRAW = 4 + 8 + 8  # bytes an entry: log-probabilities, their exponentials, cumulative sums
TOPK = 4 + 4  # bytes an entry: an id and a log-probability
ZERO_BUCKET = 500_000_000  # DeepSpeed's default, in numbers
PREFERENCE = "smopd.rewards.preference_model:preference_reward"


@dataclass(frozen=True, kw_only=True)
class Options(Selection):
    """Any setting of the recipe goes over it by its dotted path, as for `python -m smopd.train`."""

    gpus: int = 8
    """GPUs, one rank each."""
    gpu_memory: float = 80.0
    """GiB of each."""
    reserve: float = 3.0
    """GiB of each GPU for CUDA's context, NCCL and fragments; an assumption."""

    @property
    def usable(self) -> int:
        """Bytes."""
        return int((self.gpu_memory - self.reserve) * GIB)


@dataclass(frozen=True)
class Need:
    """One line of a run's table: bytes on a GPU by column."""

    what: str
    bytes: Mapping[str, int]
    note: str = ""


@dataclass(frozen=True)
class Sizes:
    """A model, from its config alone. Counts are numbers, not bytes."""

    numbers: ModelNumbers
    layer: int
    """Parameters of the largest decoder layer."""
    intermediate: int
    linears: Mapping[str, int]
    """Name of a linear layer inside the decoder's layers -> inputs plus outputs, over all layers."""

    @property
    def root(self) -> int:
        """Parameters of what belongs to no decoder layer: embeddings, final norm, head."""
        return self.numbers.parameters - self.numbers.layers * self.layer

    def adapter(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of a LoRA adapter. Raises ValueError where a target is no linear layer of this model."""
        wanted = set(self.linears) if "all-linear" in targets else set(targets)
        if unknown := sorted(wanted - set(self.linears)):
            raise ValueError(f"targets {unknown} are none of the model's {sorted(self.linears)}")
        return rank * sum(self.linears[name] for name in wanted)

    def kept(self, width: int) -> int:
        """Bytes a position that a Llama or Qwen2 layer keeps for its backward, attention without a mask.

        Two norms (input in fp32, normalised, scaled; 1/rms), q, k, v, output and log-sum-exp of attention,
        and gate, silu(gate), up and their product of the MLP.
        """
        of = self.numbers
        norms = 2 * ((FP32 + 2 * width) * of.hidden + FP32)
        attention = 2 * width * of.head_dim * (of.heads + of.kv_heads) + FP32 * of.heads
        return norms + attention + 4 * width * self.intermediate


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        options, given = read_options(Options, words, "python -m smopd.plan")
        if options.gpus < 1 or options.gpu_memory <= 0:
            got = f"{options.gpus} and {options.gpu_memory:g}"
            raise Mistakes([f"command line: --gpus and --gpu-memory: got {got}, expected more than 0"])
        needs = plan(options, read_settings(options.recipe, given, options.only))
    except Mistakes as mistakes:
        for line in mistakes.lines:
            print(f"error: {line}", file=sys.stderr)
        return 2
    show(needs, options)
    return 0 if all(max(totals(lines).values()) <= options.usable for lines in needs.values()) else 1


def plan(options: Options, settings: Settings) -> dict[str, list[Need]]:
    """Run -> the lines of its table.

    Raises:
        Mistakes: a model's config cannot be read, or settings do not go with it.
    """
    from smopd.run.failures import UnusableInput

    found: dict[str, list[Need]] = {}
    for name in settings.runs:
        if not options.only or name in options.only:
            try:
                needs = Plan(settings, name, options).needs()
            except (UnusableInput, ValueError) as error:
                raise Mistakes([f"runs.{name}: {next(iter(str(error).splitlines()))}"]) from error
            found[name] = [need for need in needs if any(need.bytes.values())]
    return found


def totals(needs: Sequence[Need]) -> dict[str, int]:
    return {column: sum(need.bytes.get(column, 0) for need in needs) for column in COLUMNS}


class Plan:
    """One run of the recipe on one GPU.

    Raises:
        UnusableInput: a config cannot be read; names the setting.
        ValueError: a setting does not go with the model or the number of GPUs.
    """

    def __init__(self, recipe: Settings, name: str, options: Options):
        self.recipe, self.own, self.name, self.options = recipe, recipe.resolved(name), name, options
        student, loop, model = self.own.student, self.own.loop, recipe.model
        if model.factory is None:
            self.student = _sizes(str(model.path), "model.path")
        else:
            self.student = _sizes(model.factory, "model.factory", json.dumps(model.kwargs))
        self.trained = self.student.numbers.parameters
        if student.lora is not None:
            self.trained = self.student.adapter(student.lora.rank, student.lora.targets)
        self.shards = student.shard_size or options.gpus
        if options.gpus % self.shards:
            raise ValueError(
                f"student.shard_size: got {self.shards}, expected a divisor of {options.gpus} GPUs"
            )
        self.responses = -(-loop.prompts_per_step // options.gpus) * self.own.rollout.group_size
        sequence = self.own.data.max_prompt_tokens + self.own.rollout.max_new_tokens
        batch = -(-self.responses // loop.updates_per_step) * sequence
        self.tokens = min(max(student.micro_batch_tokens, sequence), batch)  # of a micro-batch
        self.teachers, self.references = self._frozen()

    def needs(self) -> list[Need]:
        student = self._student()
        held = sum(need.bytes.get("rollout", 0) for need in student if need.what != "AdamW, fp32")
        return [*student, *self._update(), *self._local(), *self._vllm(held), *self._topk(), *self._rewards()]

    def _student(self) -> list[Need]:
        student, width = self.own.student, WIDTHS[self.own.student.compute_dtype]
        parameters = self.student.numbers.parameters
        frozen = 0 if student.lora is None else width * parameters
        parts, note = self.shards, f"1/{self.shards}"
        if student.strategy == "deepspeed":  # computes with a copy; stage 2 keeps it whole
            parts, note = self.options.gpus, f"ZeRO-{student.zero_stage}, 1/{self.options.gpus}"
            frozen = width * parameters * (parts if student.zero_stage == 2 else 1)
        held = 0 if student.offload_optimizer else -(-self.trained // parts)
        note = "in host memory" if student.offload_optimizer else note
        loaded = FP32 * self.trained + (width * parameters if student.lora else 0)
        beside = dict.fromkeys(RUNNING, -(-frozen // parts))
        return [
            Need("model as it is loaded", {"start": loaded}, "whole, before it is sharded"),
            Need("masters, fp32", dict.fromkeys(RUNNING, FP32 * held), note),
            Need("parameters beside them", beside, student.compute_dtype),
            Need("AdamW, fp32", dict.fromkeys(RUNNING, ADAMW * held), note),
            Need("gradients, fp32", {"update": FP32 * held}, note),
        ]

    def _update(self) -> list[Need]:
        """What the forward and backward of a micro-batch add at most."""
        from smopd.kernels.head.chunks import CHUNK_BYTES

        student, size, numbers = self.own.student, self.student, self.student.numbers
        width, tokens = WIDTHS[student.compute_dtype], self.tokens
        whole = width * (size.root + size.layer * (2 if self.shards > 1 else 1))
        bucket = 2 * (self.trained // numbers.layers if student.lora else size.layer)
        if student.strategy == "deepspeed":
            bucket = min(self.trained, ZERO_BUCKET)
        states, layer = tokens * width * numbers.hidden, tokens * size.kept(width)
        activations = numbers.layers * (states if student.gradient_checkpointing else layer)
        if student.gradient_checkpointing:
            activations += layer
        activations += 2 * tokens * width * size.intermediate + states  # of the backward
        after = 0 if student.lora else 2 * FP32 * size.root  # the root's gradients, reduced at the end
        head = min(CHUNK_BYTES, tokens * numbers.vocabulary * width) + 2 * states
        head += 0 if student.lora else (FP32 + width) * numbers.head_parameters
        note = f"{tokens:,} positions{', checkpointed' if student.gradient_checkpointing else ''}"
        return [
            Need("whole parameters", {"update": whole}, "embeddings, head and up to two layers"),
            Need("whole gradients", {"update": FP32 * bucket}, "a layer's, while they are reduced in fp32"),
            Need("activations", {"update": max(activations, after)}, note),
            Need("fused head", {"update": head}, "a chunk of logits, its gradients"),
        ]

    def _local(self) -> Iterator[Need]:
        """The engines that compute in torch."""
        rollout, teachers, numbers = self.own.rollout, self.own.teachers, self.student.numbers
        if rollout.engine == "local" and not rollout.urls:
            width, longest = WIDTHS[rollout.dtype], self.own.longest_sequence
            at_work = RUNNING if self.own.loop.async_level else ("rollout",)  # 1 samples beside all the rest
            most = max(rollout.max_batch_tokens, rollout.group_size * longest)
            positions = min(self.responses * longest, most)
            rows = max(rollout.group_size, positions // longest)
            cache = numbers.kv_bytes(width) * positions
            cache += cache // (2 * numbers.layers)  # a layer's keys are copied as they grow
            draws = rows * numbers.vocabulary * (width + DRAW)
            yield Need("rollout weights", dict.fromkeys(RUNNING, width * numbers.parameters), "a whole copy")
            yield Need("rollout KV cache", dict.fromkeys(at_work, cache), f"{positions:,} positions")
            yield Need("sampling", dict.fromkeys(at_work, draws), f"{rows} responses at once")
        if teachers.engine == "local":
            held = [*self.teachers, *self.references]
            weights = WIDTHS[teachers.dtype] * sum(size.numbers.parameters for size in held)
            yield Need("teachers' weights", dict.fromkeys(RUNNING, weights), f"{len(held)} models")

    def _vllm(self, held: int) -> Iterator[Need]:
        """The run's vLLM engines in the order in which they are made; those of earlier runs are not counted.

        Args:
            held: bytes of the student when they are made.
        """
        from smopd.engine.vllm.memory import Gpu, engine_memory

        rollout, teachers = self.own.rollout, self.own.teachers
        wanted: dict[tuple[str, ModelNumbers], tuple[Vllm, str]] = {}
        if rollout.engine == "vllm" and not rollout.urls:
            wanted["rollout", self.student.numbers] = (rollout.vllm, rollout.dtype)
        if teachers.engine == "vllm":
            slots = teachers.vllm.engines or len(self.teachers)
            for i, size in enumerate(self.teachers):
                wanted[f"teachers {i % slots}", size.numbers] = (teachers.vllm, teachers.dtype)
            for size in self.references:
                wanted["reference", size.numbers] = (teachers.vllm, teachers.dtype)
        awake = asleep = 0
        turns, one_sleeps = [0], False
        for (role, numbers), (vllm, dtype) in wanted.items():
            samples, longest = role == "rollout", vllm.max_model_len or self.own.longest_sequence
            gpu = Gpu(self.options.usable - held - awake, int(self.options.gpu_memory * GIB), asleep)
            taken = engine_memory(vllm, numbers, WIDTHS[dtype], longest, gpu, samples=samples)
            if taken.cache < taken.least:
                got, least = taken.cache / GIB, taken.least / GIB
                raise ValueError(
                    f"{role}: {got:.2f} GiB of cache, expected {least:.2f}, one longest sequence"
                )
            colocated = vllm.placement == "colocated"  # of those of one process the first alone sleeps
            sleeps = vllm.sleep and not (colocated and one_sleeps)
            one_sleeps |= sleeps and colocated
            awake, asleep = (awake, asleep + taken.total) if sleeps else (awake + taken.total, asleep)
            if sleeps and not samples:
                turns.append(taken.total)
                continue
            columns = ("rollout",) if sleeps and not self.own.loop.async_level else RUNNING
            cache = dict.fromkeys(columns, taken.cache)
            yield Need(f"{role} KV cache", cache, "vLLM")
            yield Need(f"{role} weights and work", dict.fromkeys(columns, taken.total - taken.cache), "vLLM")
        yield Need("teachers in turn", {"teachers": max(turns)}, "vLLM, one engine awake at a time")

    def _topk(self) -> Iterator[Need]:
        own, opd = self.own, self.own.opd
        asked = len(own.teachers.models) if distils(own, self.name) else 0
        asked += product_reference(own, self.name) is not None
        entries = opd.kappa * (asked if own.unites else 1)
        topk = self.responses * own.rollout.max_new_tokens * asked * (entries * TOPK + FP32)
        yield Need("teachers' top-kappa", {"teachers": topk, "update": topk}, f"kappa {opd.kappa}")

    def _rewards(self) -> Iterator[Need]:
        """Preference models, each in its reward's process on this GPU."""
        from smopd.engine.models.loading import stored_dtype

        for i, reward in enumerate(self.own.rewards):
            given = reward.kwargs
            here = not given.get("url") and str(given.get("device") or "cuda").startswith("cuda")
            if reward.function == PREFERENCE and "model" in given and here:
                numbers = _sizes(str(given["model"]), f"rewards.{i}.kwargs.model").numbers
                head = 0 if numbers.tied else numbers.head_parameters  # a row in its place
                weights = stored_dtype(given["model"]).itemsize * (numbers.parameters - head)
                yield Need(f"preference model, {reward.name}", dict.fromkeys(RUNNING, weights), "its weights")

    def _frozen(self) -> tuple[list[Sizes], list[Sizes]]:
        """Teachers, or the base of their adapters, and the reference policy where none of these holds it."""
        from smopd.engine.weights.adapters import read_adapter

        own, runs = self.own, self.recipe.runs
        held: dict[str, Sizes] = {}
        for i, teacher in enumerate(own.teachers.models if distils(own, self.name) else ()):
            base = teacher.model
            if is_url(base):
                continue
            if base in runs and self.recipe.resolved(base).student.lora is not None:
                base = self._start(base)
            elif base not in runs and (adapter := read_adapter(base)):
                base = adapter.base
            held |= self._find(base, f"teachers.models.{i}.model")
        product = product_reference(own, self.name)
        if product is not None and not is_url(product):
            held |= self._find(product, "opd.product.reference")
        start = self._find(self._start(self.name), "model.path")
        alone = own.kl_ref.coef > 0 and own.student.lora is None and not start.keys() <= held.keys()
        return list(held.values()), [self.student] if alone else []

    def _start(self, run: str) -> str:
        """What a run starts from; a merge is a model of its own."""
        merged = weight_merge(self.recipe.resolved(run), run) is not None
        return f"{run}/start" if merged else self.recipe.runs[run].init

    def _find(self, model: str, setting: str) -> dict[str, Sizes]:
        """The model's sizes, under a name that is the same for two names of one model."""
        from smopd.engine.weights.adapters import same_place

        if model == BASE and not needs_base(self.recipe):
            model = str(self.recipe.model.path)
        if model == BASE or model in self.recipe.runs or model.endswith("/start"):
            return {model: self.student}
        return {same_place(model): _sizes(model, setting)}


@cache
def _sizes(model: str, setting: str, kwargs: str | None = None) -> Sizes:
    """Of the model at a path or hub id, or of what a factory makes; on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from smopd.data.sources import import_function
    from smopd.engine.models.sizes import numbers_of
    from smopd.run.failures import error_context

    with error_context(setting), torch.device("meta"):
        if kwargs is not None:
            made = import_function(model)(seed=0, **json.loads(kwargs))[0]
        else:
            made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        layers = getattr(made.get_decoder(), "layers", None)
        if layers is None:
            raise ValueError(f"a {type(made).__name__} has no decoder layers that can be counted")
        linears: Counter[str] = Counter()
        for path, module in layers.named_modules():
            if isinstance(module, torch.nn.Linear):
                linears[path.rpartition(".")[2]] += module.in_features + module.out_features
        largest = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
        return Sizes(numbers_of(made), largest, made.config.intermediate_size, linears)


def show(needs: Mapping[str, Sequence[Need]], options: Options) -> None:
    """Prints the table of the run that needs most, and a line for each."""
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)
    shown = max(needs, key=lambda run: max(totals(needs[run]).values()))
    table = Table(box=None, pad_edge=False)
    table.add_column(f"{shown}: GiB a GPU")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for need in (*needs[shown], Need("total", totals(needs[shown]))):
        cells = [f"{count / GIB:.3f}" if (count := need.bytes.get(c, 0)) else "" for c in COLUMNS]
        table.add_row(need.what, *cells, need.note)
    console.print(table)
    usable = options.usable / GIB
    console.print(f"usable: {usable:.2f} GiB a GPU, {options.reserve:g} kept back", markup=False)
    for run, of_run in needs.items():
        column, most = max(totals(of_run).items(), key=lambda item: item[1])
        over = most / GIB - usable
        verdict = "fits" if over <= 0 else f"does not fit, by {over:.2f}"
        console.print(f"run {run}: {most / GIB:.2f} GiB at most, in {column}: {verdict}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
