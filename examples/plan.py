"""`python CLONE/examples/plan.py RECIPE --gpus 8`: estimate the memory of each run on each GPU.

Reads model configs and loads no weights. Counts parameters, gradients, AdamW states, KV caches and vLLM
engines (engine/vllm/memory.py), but not an update's activations and logits, or models of rewards. They must
fit into the memory that the column `update` leaves free. The estimates were not checked on a GPU.

Exit status: 0 if every run fits, 1 if a run does not fit, 2 if arguments are invalid.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rich.console import Console
from rich.table import Table

from smopd.config.cli import Selection, read_options, read_settings
from smopd.config.recipe import Mistakes
from smopd.config.schedule import BASE, distils, needs_base, weight_merge
from smopd.config.settings import Settings
from smopd.engine.models.sizes import ModelNumbers
from smopd.engine.settings import Vllm
from smopd.engine.vllm.memory import GIB, Gpu, engine_memory
from smopd.names import is_url

TABLE_WIDTH = 132  # characters, if the output is no terminal
RUNNING = ("rollout", "teachers", "update")
COLUMNS = ("start", *RUNNING)
WIDTHS = {"float32": 4, "bfloat16": 2}
FP32, ADAMW = 4, 8  # bytes per parameter, for a master weight or a gradient, and for AdamW's moments
DRAW = 4 + 8 + 8  # bytes per logit: log-probability, its exponential, cumulative sum


@dataclass(frozen=True, kw_only=True)
class Options(Selection):
    """Override any setting of the recipe by its dotted path, as for `smopd train`."""

    gpus: int = 8
    """Number of GPUs, with one rank each."""
    gpu_memory: float = 80.0
    """Memory of each GPU, GiB."""
    reserve: float = 3.0
    """GiB of each GPU for the CUDA context, NCCL and fragmentation (an assumption)."""

    @property
    def usable(self) -> int:
        """Usable bytes of each GPU."""
        return int((self.gpu_memory - self.reserve) * GIB)


@dataclass(frozen=True)
class Need:
    """One line of a run's table: bytes on a GPU by column."""

    what: str
    bytes: Mapping[str, int]
    note: str = ""


@dataclass(frozen=True)
class Sizes:
    """Element counts of a model, read from its config."""

    numbers: ModelNumbers
    linears: Mapping[str, int]
    """Name of a linear layer of the decoder -> inputs plus outputs, summed over layers."""

    def adapter(self, rank: int, targets: Sequence[str]) -> int:
        """Return the parameters of a LoRA adapter. Raises ValueError for an unknown target."""
        wanted = set(self.linears) if "all-linear" in targets else set(targets)
        if unknown := sorted(wanted - set(self.linears)):
            raise ValueError(f"targets: got {unknown}, expected some of {sorted(self.linears)}")
        return rank * sum(self.linears[name] for name in wanted)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        options, given = read_options(Options, words, "examples.plan")
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
    """Return the table lines of each run. Raise Mistakes if a run is invalid."""
    from smopd.engine.errors import Failure

    found: dict[str, list[Need]] = {}
    for name in options.only or settings.runs:
        try:
            needs = Plan(settings, name, options).needs()
        except (Failure, ValueError) as error:
            raise Mistakes([f"runs.{name}: {next(iter(str(error).splitlines()))}"]) from error
        found[name] = [need for need in needs if any(need.bytes.values())]
    return found


def totals(needs: Sequence[Need]) -> dict[str, int]:
    return {column: sum(need.bytes.get(column, 0) for need in needs) for column in COLUMNS}


class Plan:
    """The memory of one run on one GPU. Raises UnusableInput or ValueError."""

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
            got = f"got {self.shards}, expected a divisor of {options.gpus} GPUs"
            raise ValueError(f"student.shard_size: {got}")
        self.responses = -(-loop.prompts_per_step // options.gpus) * self.own.rollout.group_size
        self.teachers, self.references = self._frozen()

    def needs(self) -> list[Need]:
        student = self._student()
        held = sum(need.bytes.get("rollout", 0) for need in student if need.what != "AdamW, fp32")
        return [*student, *self._local(), *self._vllm(held)]

    def _student(self) -> list[Need]:
        student, width = self.own.student, WIDTHS[self.own.student.compute_dtype]
        parameters = self.student.numbers.parameters
        frozen = 0 if student.lora is None else width * parameters
        parts, note = self.shards, f"1/{self.shards}"
        if student.strategy == "deepspeed":  # computes with a copy, which stage 2 does not shard
            parts, note = self.options.gpus, f"ZeRO-{student.zero_stage}, 1/{self.options.gpus}"
            frozen = width * parameters * (parts if student.zero_stage == 2 else 1)
        held = 0 if student.offload_optimizer else -(-self.trained // parts)
        note = "in host memory" if student.offload_optimizer else note
        loaded = FP32 * self.trained + (width * parameters if student.lora else 0)
        copy = dict.fromkeys(RUNNING, -(-frozen // parts))
        return [
            Need("model while loading", {"start": loaded}, "not sharded yet"),
            Need("master weights, fp32", dict.fromkeys(RUNNING, FP32 * held), note),
            Need("frozen or compute copy", copy, student.compute_dtype),
            Need("AdamW, fp32", dict.fromkeys(RUNNING, ADAMW * held), note),
            Need("gradients, fp32", {"update": FP32 * held}, note),
        ]

    def _local(self) -> Iterator[Need]:
        """Yield the needs of the engines that run in torch."""
        rollout, teachers, numbers = self.own.rollout, self.own.teachers, self.student.numbers
        if rollout.engine == "local" and not rollout.urls:
            width, longest = WIDTHS[rollout.dtype], self.own.longest_sequence
            sampling = RUNNING if self.own.loop.async_level else ("rollout",)
            most = max(rollout.max_batch_tokens, rollout.group_size * longest)
            positions = min(self.responses * longest, most)
            rows = max(rollout.group_size, positions // longest)
            cache = numbers.kv_bytes(width) * positions
            cache += cache // (2 * numbers.layers)  # the keys of one layer are copied when they grow
            draws = rows * numbers.vocabulary * (width + DRAW)
            yield Need("rollout weights", dict.fromkeys(RUNNING, width * numbers.parameters), "a copy")
            yield Need("rollout KV cache", dict.fromkeys(sampling, cache), f"{positions:,} positions")
            yield Need("sampling", dict.fromkeys(sampling, draws), f"{rows} responses at once")
        if teachers.engine == "local":
            held = [*self.teachers, *self.references]
            weights = WIDTHS[teachers.dtype] * sum(size.numbers.parameters for size in held)
            yield Need("teachers' weights", dict.fromkeys(RUNNING, weights), f"{len(held)} models")

    def _vllm(self, held: int) -> Iterator[Need]:
        """Yield the vLLM engines' needs, in order of creation. `held`: the student's bytes at that time."""
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
                got = f"got {taken.cache / GIB:.2f} GiB, expected {taken.least / GIB:.2f}"
                raise ValueError(f"KV cache of {role}: {got} for the longest sequence")
            colocated = vllm.placement == "colocated"  # only the first engine of a process can sleep
            sleeps = vllm.sleep and not (colocated and one_sleeps)
            one_sleeps |= sleeps and colocated
            awake, asleep = (awake, asleep + taken.total) if sleeps else (awake + taken.total, asleep)
            if sleeps and not samples:
                turns.append(taken.total)
                continue
            columns = ("rollout",) if sleeps and not self.own.loop.async_level else RUNNING
            yield Need(f"{role} KV cache", dict.fromkeys(columns, taken.cache), "vLLM")
            yield Need(f"{role} weights and work", dict.fromkeys(columns, taken.total - taken.cache), "vLLM")
        yield Need("teachers in turn", {"teachers": max(turns)}, "vLLM, one engine awake at a time")

    def _frozen(self) -> tuple[list[Sizes], list[Sizes]]:
        """Return the sizes of the teachers and of a separate reference. A LoRA teacher counts as its base."""
        from smopd.engine.weights.adapters import read_adapter

        own, runs = self.own, self.recipe.runs
        held: dict[str, Sizes] = {}
        for i, teacher in enumerate(own.teachers.models if distils(own, self.name) else ()):
            model = teacher.model
            if model in runs and self.recipe.resolved(model).student.lora is not None:
                model = self._start(model)
            elif model not in runs and (adapter := read_adapter(model)):
                model = adapter.base
            held |= self._find(model, f"teachers.models.{i}.model")
        start = self._find(self._start(self.name), "model.path")
        alone = own.kl_ref.coef > 0 and own.student.lora is None and not start.keys() <= held.keys()
        return list(held.values()), [self.student] if alone else []

    def _start(self, run: str) -> str:
        """Return the name of the model from which a run starts. A weight merge has its own name."""
        merged = weight_merge(self.recipe.resolved(run), run) is not None
        return f"{run}/start" if merged else self.recipe.runs[run].init

    def _find(self, model: str, setting: str) -> dict[str, Sizes]:
        """Return a model's sizes under its canonical name, or {} for a model at a URL."""
        from smopd.engine.weights.adapters import same_place

        if is_url(model):
            return {}
        if model == BASE and not needs_base(self.recipe):
            model = str(self.recipe.model.path)
        if model == BASE or model in self.recipe.runs or model.endswith("/start"):
            return {model: self.student}
        return {same_place(model): _sizes(model, setting)}


@cache
def _sizes(model: str, setting: str, kwargs: str | None = None) -> Sizes:
    """Return the sizes of a path, hub id, or factory (if `kwargs` is given), built on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from smopd.engine.imports import resolve
    from smopd.engine.models.loading import place_of
    from smopd.engine.models.sizes import numbers_of
    from smopd.run.failures import error_context

    with error_context(setting), torch.device("meta"):
        if kwargs is not None:
            made = resolve(model, dict[str, Any]())(seed=0, **json.loads(kwargs))[0]
        else:
            config = AutoConfig.from_pretrained(place_of(model), trust_remote_code=False)
            made = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        layers = getattr(made.get_decoder(), "layers", None)
        if layers is None:
            raise ValueError(f"{type(made).__name__} is not supported by the planner: no decoder layers")
        linears: Counter[str] = Counter()
        for path, module in layers.named_modules():
            if isinstance(module, torch.nn.Linear):
                linears[path.rpartition(".")[2]] += module.in_features + module.out_features
        return Sizes(numbers_of(made), linears)


def show(needs: Mapping[str, Sequence[Need]], options: Options) -> None:
    """Print the table of the largest run, and one line per run."""
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)
    shown = max(needs, key=lambda run: max(totals(needs[run]).values()))
    table = Table(box=None, pad_edge=False)
    table.add_column(f"{shown}: GiB per GPU")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for need in (*needs[shown], Need("total", totals(needs[shown]))):
        cells = [f"{count / GIB:.3f}" if (count := need.bytes.get(c, 0)) else "" for c in COLUMNS]
        table.add_row(need.what, *cells, need.note)
    console.print(table)
    usable = options.usable / GIB
    console.print(f"usable: {usable:.2f} GiB per GPU, {options.reserve:g} GiB reserved", markup=False)
    for run, lines in needs.items():
        column, most = max(totals(lines).items(), key=lambda item: item[1])
        over = most / GIB - usable
        verdict = "fits" if over <= 0 else f"does not fit, by {over:.2f} GiB"
        console.print(f"run {run}: at most {most / GIB:.2f} GiB, in {column}: {verdict}", markup=False)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # to find the recipe's functions, as the command smopd does
    sys.exit(main())
