"""`python -m smopd.plan RECIPE --gpus 8 --gpu-memory 80`: the memory of each run on each GPU.

Reads configs and loads no weights. Takes a recipe and any setting over it, as `smopd.train` does. Parameters,
gradients, AdamW's states, caches and vLLM engines (by the engines' own rule, engine/vllm/memory.py) are
counted; what an update adds is bounded from above, as if all of it were held at once. Not checked on a GPU.
One file of over 500 lines, as every figure is read together with the table that shows it.

Exit status 0: every run fits; 1: one does not; 2: a mistake.
"""

from __future__ import annotations

from smopd import extra  # noqa: F401 says what to install

# isort: split

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from smopd.config.cli import COMMAND_LINE, DEFAULT_RECIPE, read_settings, split
from smopd.config.errors import nearest
from smopd.config.recipe import Mistakes
from smopd.config.schedule import BASE, distils, needs_base, ordered, product_reference, weight_merge
from smopd.config.settings import Settings
from smopd.names import is_url

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smopd.engine.models.sizes import ModelNumbers
    from smopd.engine.settings import Vllm
    from smopd.engine.vllm.memory import EngineMemory

MIB, GIB = 1 << 20, 1 << 30
TABLE_WIDTH = 132  # characters, where the output is no terminal
RUNNING = ("rollout", "teachers", "update")
COLUMNS = ("start", *RUNNING)
WIDTHS = {"float32": 4, "bfloat16": 2}
FP32, ADAMW = 4, 8  # bytes a parameter: a master or a gradient; AdamW's two moments
DRAW = 4 + 8 + 8  # bytes an entry: log-probabilities, their exponentials, cumulative sums
TOPK = 4 + 4  # bytes an entry: an id and a log-probability
ZERO_BUCKET = 500_000_000  # DeepSpeed's default, in numbers
PREFERENCE = "smopd.rewards.preference_model:preference_reward"


@dataclass(frozen=True)
class Options:
    """Any setting of the recipe goes over it by its dotted path, as for `python -m smopd.train`."""

    recipe: Annotated[str, tyro.conf.Positional] = DEFAULT_RECIPE
    """A recipe's name, or a YAML file."""
    gpus: int = 8
    """GPUs, one rank each."""
    gpu_memory: float = 80.0
    """GiB of each."""
    reserve: float = 3.0
    """GiB of each GPU for CUDA's context, NCCL and fragments; an assumption."""
    only: tuple[str, ...] = ()
    """Plan these runs alone, as `python -m smopd.train --only` does them."""
    json: bool = False


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
    kind: str
    layer_parameters: int
    """Of the largest decoder layer."""
    intermediate: int
    stored: int
    """Bytes of a stored number."""
    linears: Mapping[str, int]
    """Name of a linear layer inside the decoder's layers -> inputs plus outputs, over all layers."""

    @property
    def root_parameters(self) -> int:
        """Of what belongs to no decoder layer: embeddings, final norm, head."""
        return self.numbers.parameters - self.numbers.layers * self.layer_parameters

    def adapter(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of a LoRA adapter. Raises ValueError where a target is no linear layer of this model."""
        wanted = set(self.linears) if "all-linear" in targets else set(targets)
        if unknown := sorted(wanted - set(self.linears)):
            raise ValueError(f"targets {unknown} are none of the model's {sorted(self.linears)}")
        return rank * sum(self.linears[name] for name in wanted)


@dataclass(frozen=True)
class Engine:
    """A vLLM engine, which lives until the command ends."""

    key: tuple[Any, ...]
    """A process has one engine a key."""
    colocated: bool
    taken: EngineMemory
    adapters: int
    """Bytes of the adapters that it holds."""
    sleeps: bool

    @property
    def total(self) -> int:
        return self.taken.total + self.adapters


def main(argv: list[str] | None = None) -> int:
    try:
        options, settings = parse(sys.argv[1:] if argv is None else argv)
        needs = plan(options, settings)
    except Mistakes as mistakes:
        for line in mistakes.lines:
            print(f"error: {line}", file=sys.stderr)
        return 2
    usable = int((options.gpu_memory - options.reserve) * GIB)
    if options.json:
        runs = {
            run: {
                "fits": max(totals(lines).values()) <= usable,
                "totals": totals(lines),
                "needs": [asdict(line) for line in lines],
            }
            for run, lines in needs.items()
        }
        print(json.dumps({"options": asdict(options), "usable": usable, "runs": runs}, indent=1))
    else:
        show(needs, options, usable)
    return 0 if all(max(totals(lines).values()) <= usable for lines in needs.values()) else 1


def parse(argv: list[str]) -> tuple[Options, Settings]:
    """Our options, and the recipe with the other options over it.

    Raises:
        Mistakes: everything that is wrong, a line each.
        SystemExit: after --help, or a mistake in our own options.
    """
    ours, given = split(argv, [option.name.replace("_", "-") for option in fields(Options)])
    options = tyro.cli(
        Options, args=ours, prog="python -m smopd.plan", config=(tyro.conf.FlagCreatePairsOff,)
    )
    settings = read_settings(options.recipe, given)
    wrong = [
        f"{COMMAND_LINE}: --{name}: got {value:g}, expected more than 0"
        for name, value in (("gpus", options.gpus), ("gpu-memory", options.gpu_memory))
        if value <= 0
    ]
    runs = list(settings.runs)
    wrong += [
        f"{COMMAND_LINE}: --only: {name!r} is no run{nearest(name, runs)}; there are {runs}"
        for name in options.only
        if name not in runs
    ]
    if wrong:
        raise Mistakes(wrong)
    return options, settings


def plan(options: Options, settings: Settings) -> dict[str, list[Need]]:
    """Run -> the lines of its table.

    Raises:
        Mistakes: a model's config cannot be read, or settings do not go with it.
    """
    from smopd.run.failures import UnusableInput

    found: dict[str, list[Need]] = {}
    engines: list[Engine] = []
    for name in ordered(settings):
        if options.only and name not in options.only:
            continue
        try:
            run = Plan(settings, settings.resolved(name), name, options)
            engines = run.with_engines(engines)
            found[name] = [need for need in run.needs(engines) if any(need.bytes.values())]
        except (UnusableInput, ValueError) as error:
            raise Mistakes([f"runs.{name}: {next(iter(str(error).splitlines()))}"]) from error
    return found


def totals(needs: Sequence[Need]) -> dict[str, int]:
    return {column: sum(need.bytes.get(column, 0) for need in needs) for column in COLUMNS}


class Plan:
    """One run on one GPU.

    Args:
        recipe: all runs' settings; `own` this run's.
    Raises:
        UnusableInput: a config cannot be read; names the setting.
        ValueError: a setting does not go with the model or the number of GPUs.
    """

    def __init__(self, recipe: Settings, own: Settings, name: str, options: Options):
        self.recipe, self.own, self.name, self.options = recipe, own, name, options
        student, loop = own.student, own.loop
        self.student = self._base()
        self.trained = self.student.numbers.parameters
        if student.lora is not None:
            self.trained = self.student.adapter(student.lora.rank, student.lora.targets)
        self.shards = student.shard_size or options.gpus
        if options.gpus % self.shards:
            raise ValueError(
                f"student.shard_size: got {self.shards}, expected a divisor of {options.gpus} GPUs"
            )
        longest, positions = own.longest_sequence, self.student.numbers.positions
        if 0 < positions < longest:
            raise ValueError(
                f"model: has {positions} positions, expected {longest} for a prompt and its response "
                "(data.max_prompt_tokens, rollout.max_new_tokens, and evaluation's)"
            )
        self.responses = -(-loop.prompts_per_step // options.gpus) * own.rollout.group_size
        sequence = own.data.max_prompt_tokens + own.rollout.max_new_tokens
        batch = -(-self.responses // loop.updates_per_step) * sequence
        self.tokens = min(max(student.micro_batch_tokens, sequence), batch)  # of a micro-batch
        self.teachers, self.adapters, self.references = self._frozen()

    def needs(self, engines: Sequence[Engine]) -> list[Need]:
        """Every line; `engines` are those that there are, earlier runs' included."""
        keys = [key for key, *_ in self._wanted()]
        left = sum(one.total for one in engines if one.key not in keys and not one.sleeps)
        earlier = Need("engines of earlier runs", dict.fromkeys(RUNNING, left), "which cannot sleep")
        rollouts, teachers = self._rollouts(engines), self._teachers(engines)
        return [*self._student(), *rollouts, *teachers, earlier, *self._rewards()]

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
        return [
            Need("model as it is loaded", {"start": loaded}, "whole, before it is sharded"),
            Need("masters, fp32", dict.fromkeys(RUNNING, FP32 * held), note),
            Need(
                "parameters beside them", dict.fromkeys(RUNNING, -(-frozen // parts)), student.compute_dtype
            ),
            Need("AdamW, fp32", dict.fromkeys(RUNNING, ADAMW * held), note),
            Need("gradients, fp32", {"update": FP32 * held}, note),
            *self._update(width),
        ]

    def _update(self, width: int) -> Iterator[Need]:
        """What the forward and backward of a micro-batch add at most."""
        from smopd.kernels.head.chunks import CHUNK_BYTES

        student, size, numbers = self.own.student, self.student, self.student.numbers
        whole = width * (size.root_parameters + size.layer_parameters * (2 if self.shards > 1 else 1))
        yield Need("whole parameters", {"update": whole}, "embeddings, head and up to two layers")
        layer = self.trained // numbers.layers if student.lora else size.layer_parameters
        bucket = min(self.trained, ZERO_BUCKET) if student.strategy == "deepspeed" else 2 * layer
        yield Need("whole gradients", {"update": FP32 * bucket}, "a layer's, while they are reduced in fp32")
        kept, one = width * numbers.hidden * numbers.layers * self.tokens, self._layer(width)
        activations = kept + one if student.gradient_checkpointing else numbers.layers * one
        backward = self.tokens * width * (2 * size.intermediate + numbers.hidden)
        after = (
            0 if student.lora else 2 * FP32 * size.root_parameters
        )  # the root's gradients, reduced at the end
        note = f"{self.tokens:,} positions{', checkpointed' if student.gradient_checkpointing else ''}"
        yield Need("activations", {"update": max(activations + backward, after)}, note)
        chunk = min(CHUNK_BYTES, self.tokens * numbers.vocabulary * width)
        states = 2 * width * self.tokens * numbers.hidden
        gradient = 0 if student.lora else (FP32 + width) * numbers.head_parameters
        yield Need("fused head", {"update": chunk + states + gradient}, "a chunk of logits, its gradients")

    def _layer(self, width: int) -> int:
        """What a Llama or Qwen2 layer keeps of a micro-batch for its backward, attention without a mask.

        A position has two norms (input in fp32, normalised, scaled; 1/rms), q, k, v, output and log-sum-exp
        of the attention, and gate, silu(gate), up and their product of the MLP.
        """
        numbers = self.student.numbers
        norms = 2 * ((FP32 + 2 * width) * numbers.hidden + FP32)
        attention = 2 * width * numbers.head_dim * (numbers.heads + numbers.kv_heads) + FP32 * numbers.heads
        return self.tokens * (norms + attention + 4 * width * self.student.intermediate)

    def _rollouts(self, engines: Sequence[Engine]) -> list[Need]:
        rollout, numbers, lag = self.own.rollout, self.student.numbers, self.own.loop.async_level
        if rollout.urls:
            return []
        if rollout.engine == "vllm":
            return [need for one in self._of(engines, "rollout") for need in _engine("rollout", one, lag > 0)]
        width, longest = WIDTHS[rollout.dtype], self.own.longest_sequence
        at_work = RUNNING if lag else ("rollout",)  # with a lag, beside all the rest
        most = max(rollout.max_batch_tokens, rollout.group_size * longest)
        positions = min(self.responses * longest, most)
        rows = max(rollout.group_size, positions // longest)
        cache = numbers.kv_bytes(width) * positions
        cache += cache // (2 * numbers.layers)  # a layer's keys are copied as they grow
        draws = rows * numbers.vocabulary * (width + DRAW)
        weights = width * numbers.parameters
        return [
            Need("rollout weights", dict.fromkeys(RUNNING, weights), "a whole copy"),
            Need("rollout KV cache", dict.fromkeys(at_work, cache), f"{positions:,} positions"),
            Need("sampling", dict.fromkeys(at_work, draws), f"{rows} responses at once"),
        ]

    def _teachers(self, engines: Sequence[Engine]) -> Iterator[Need]:
        own, opd = self.own, self.own.opd
        asked = len(own.teachers.models) if distils(own, self.name) else 0
        asked += product_reference(own, self.name) is not None
        entries = opd.kappa * (asked if own.unites else 1)
        topk = self.responses * own.rollout.max_new_tokens * asked * (entries * TOPK + FP32)
        yield Need("teachers' top-kappa", {"teachers": topk, "update": topk}, f"kappa {opd.kappa}")
        held = [*self.teachers, *self.references]
        if own.teachers.engine == "local":
            width = WIDTHS[own.teachers.dtype]
            weights = width * (sum(size.numbers.parameters for size in held) + self.adapters)
            yield Need("teachers' weights", dict.fromkeys(RUNNING, weights), f"{len(held)} models")
            return
        ours = [one for role in ("teachers", "reference") for one in self._of(engines, role)]
        for one in ours:
            if not one.sleeps:
                yield from _engine(str(one.key[0]), one, always=True)
        if asleep := [one for one in ours if one.sleeps]:
            widest = max(asleep, key=lambda one: one.total)
            note = f"{len(asleep)} engines, one awake at a time"
            yield Need("teachers in turn", {"teachers": widest.total}, note)

    def _rewards(self) -> Iterator[Need]:
        """Preference models, each in its reward's process on this GPU."""
        for i, reward in enumerate(self.own.rewards):
            given = reward.kwargs
            here = not given.get("url") and str(given.get("device") or "cuda").startswith("cuda")
            if reward.function == PREFERENCE and "model" in given and here:
                size = _sizes(str(given["model"]), f"rewards.{i}.kwargs.model")
                head = 0 if size.numbers.tied else size.numbers.head_parameters  # a row in its place
                weights = size.stored * (size.numbers.parameters - head)
                yield Need(f"preference model, {reward.name}", dict.fromkeys(RUNNING, weights), "its weights")

    def _of(self, engines: Sequence[Engine], role: str) -> list[Engine]:
        keys = [key for key, *_ in self._wanted()]
        return [one for one in engines if one.key in keys and str(one.key[0]).startswith(role)]

    def _wanted(self) -> Iterator[tuple[tuple[Any, ...], Sizes, Vllm, int, int]]:
        """The vLLM engines of this run as they are made: key, model, settings, width, adapters' numbers."""
        rollout, teachers = self.own.rollout, self.own.teachers

        def engine(role: str, size: Sizes, vllm: Vllm, dtype: str, adapters: int) -> tuple[Any, ...]:
            key = (role, size.kind, size.numbers.parameters, dtype, adapters > 0, repr(vllm))
            return key, size, vllm, WIDTHS[dtype], adapters

        if rollout.engine == "vllm" and not rollout.urls:
            adapters = self.trained if self.own.student.lora is not None else 0
            yield engine("rollout", self.student, rollout.vllm, rollout.dtype, adapters)
        if teachers.engine == "vllm":
            slots = min(teachers.vllm.engines or len(self.teachers), len(self.teachers))
            for i, size in enumerate(self.teachers):
                adapters = self.adapters if i == 0 else 0  # their base comes first
                yield engine(f"teachers {i % slots}", size, teachers.vllm, teachers.dtype, adapters)
            for size in self.references:
                yield engine("reference", size, teachers.vllm, teachers.dtype, 0)

    def with_engines(self, there: Sequence[Engine]) -> list[Engine]:
        """`there`, those of earlier runs, and what this run adds: one a key, and none is ever dropped.

        Raises:
            ValueError: vLLM makes no such engine.
        """
        from smopd.engine.vllm.memory import Gpu, engine_memory

        made, memory = list(there), self.options.gpu_memory - self.options.reserve
        states = sum(need.bytes.get("rollout", 0) for need in self._student() if need.what != "AdamW, fp32")
        for key, size, vllm, width, adapters in self._wanted():
            if any(one.key == key for one in made):
                continue
            samples, colocated = key[0] == "rollout", vllm.placement == "colocated"
            sleeps = vllm.sleep and not any(one.sleeps for one in made if one.colocated and colocated)
            taken = engine_memory(
                vllm,
                size.numbers,
                width,
                vllm.max_model_len or self.own.longest_sequence,
                Gpu(
                    free=int(memory * GIB) - states - sum(one.total for one in made if not one.sleeps),
                    total=int(self.options.gpu_memory * GIB),
                    asleep=sum(one.total for one in made if one.sleeps),
                ),
                samples=samples,
                pooled=not samples,
            )
            if taken.cache < taken.least:
                raise ValueError(
                    f"{key[0]}: {taken.cache / GIB:.2f} GiB of cache by kv_cache_memory_bytes or "
                    f"gpu_memory_utilization, expected at least {taken.least / GIB:.2f}, one longest sequence"
                )
            held = width * adapters // vllm.tensor_parallel_size
            made.append(Engine(key, colocated, taken, held, sleeps))
        return made

    def _frozen(self) -> tuple[list[Sizes], int, list[Sizes]]:
        """Teachers' models (or the base of their adapters), their adapters' numbers, and references.

        Each once, where neither the student nor a teacher holds its weights already.
        """
        from smopd.engine.weights.adapters import read_adapter

        own, runs = self.own, self.recipe.runs
        whole: dict[str, Sizes] = {}
        adapters = 0
        for i, teacher in enumerate(own.teachers.models if distils(own, self.name) else ()):
            setting = f"teachers.models.{i}.model"
            if is_url(teacher.model):
                continue
            if teacher.model in runs:
                lora = self.recipe.resolved(teacher.model).student.lora
                base = self._start(teacher.model) if lora else teacher.model
                adapters += self.student.adapter(lora.rank, lora.targets) if lora else 0
            elif adapter := read_adapter(teacher.model):
                base, targets = adapter.base, adapter.config["target_modules"]
                names = [targets] if isinstance(targets, str) else targets
                adapters += self._model(base, setting).adapter(adapter.config["r"], names)
            else:
                base = teacher.model
            whole[self._place(base)] = self._model(base, setting)
        reference = product_reference(own, self.name)
        if reference is not None and not is_url(reference):
            whole[self._place(reference)] = self._model(reference, "opd.product.reference")
        if own.kl_ref.coef == 0:
            return list(whole.values()), adapters, []
        start = self._start(self.name)
        kept = start if own.kl_ref.model == "init" else own.kl_ref.model
        held = self._place(kept) in whole or (own.student.lora and self._place(kept) == self._place(start))
        return list(whole.values()), adapters, [] if held else [self._model(kept, "kl_ref.model")]

    def _start(self, run: str) -> str:
        """What a run starts from; a merge is a model of its own."""
        merged = weight_merge(self.recipe.resolved(run), run) is not None
        return f"{run}/start" if merged else self.recipe.runs[run].init

    def _place(self, model: str) -> str:
        """The same for two names of one model."""
        from smopd.engine.weights.adapters import same_place

        if model == BASE and not needs_base(self.recipe):
            model = str(self.recipe.model.path)
        return model if model == BASE or model in self.recipe.runs else same_place(model)

    def _model(self, model: str, setting: str) -> Sizes:
        ours = model == BASE or model in self.recipe.runs or model.endswith("/start")
        return self.student if ours else _sizes(model, setting)

    def _base(self) -> Sizes:
        model = self.recipe.model
        if model.factory is None:
            return _sizes(str(model.path), "model.path")
        return _sizes(model.factory, "model.factory", json.dumps(model.kwargs))


def _engine(name: str, engine: Engine, always: bool) -> list[Need]:
    """An engine of one role; `always`: also while another part works."""
    taken, awake = engine.taken, RUNNING if always or not engine.sleeps else (name,)
    weights = taken.weights + taken.head + engine.adapters
    return [
        Need(f"{name} weights", dict.fromkeys(awake, weights), "vLLM"),
        Need(f"{name} KV cache", dict.fromkeys(awake, taken.cache), "vLLM"),
        Need(f"{name} vLLM's work", dict.fromkeys(awake, taken.work), "assumed"),
    ]


@cache
def _sizes(model: str, setting: str, kwargs: str | None = None) -> Sizes:
    """Of the model at a path or hub id, or of what a factory makes; on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from smopd.data.sources import import_function
    from smopd.engine.models.loading import stored_dtype
    from smopd.run.failures import error_context

    with error_context(setting), torch.device("meta"):
        if kwargs is not None:
            return measured(import_function(model)(seed=0, **json.loads(kwargs))[0], FP32)
        stored = stored_dtype(model).itemsize
        return measured(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)), stored)


def measured(model: PreTrainedModel, stored: int) -> Sizes:
    """The sizes of `model`. Raises ValueError where it has no decoder layers with a head on them."""
    from torch import nn

    from smopd.engine.models.sizes import numbers_of

    layers = getattr(model.get_decoder(), "layers", None)
    if not layers or model.get_output_embeddings() is None:
        raise ValueError(f"a {type(model).__name__} has no decoder layers with a head on them")
    linears: dict[str, int] = {}
    for path, module in layers.named_modules():
        if isinstance(module, nn.Linear):
            last = path.rpartition(".")[2]
            linears[last] = linears.get(last, 0) + module.in_features + module.out_features
    return Sizes(
        numbers=numbers_of(model),
        kind=model.config.model_type,
        layer_parameters=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        intermediate=model.config.intermediate_size,
        stored=stored,
        linears=linears,
    )


def show(needs: Mapping[str, Sequence[Need]], options: Options, usable: int) -> None:
    """Prints the table of the run that needs most, and a line for each."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH, highlight=False, color_system=None)
    shown = max(needs, key=lambda run: max(totals(needs[run]).values()))
    lines = needs[shown]
    unit, name = (GIB, "GiB") if max(totals(lines).values()) >= GIB else (MIB, "MiB")
    table = Table(box=box.SIMPLE if console.is_terminal else None, pad_edge=False)
    table.add_column(f"{shown}: {name} a GPU")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for need in (*lines, Need("total", totals(lines))):
        cells = [f"{count / unit:.2f}" if (count := need.bytes.get(c, 0)) else "" for c in COLUMNS]
        table.add_row(need.what, *cells, need.note)
    console.print(table)
    console.print(f"usable: {usable / GIB:.2f} GiB a GPU, {options.reserve:g} kept back", markup=False)
    for run, of_run in needs.items():
        column, most = max(totals(of_run).items(), key=lambda item: item[1])
        over = (most - usable) / GIB
        verdict = "fits" if over <= 0 else f"does not fit, by {over:.2f}"
        console.print(f"run {run}: {most / GIB:.2f} GiB at most, in {column}: {verdict}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
