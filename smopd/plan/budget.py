"""What a run needs on each GPU: memory line by line and moment by moment, and the traffic of a weight sync.

Arithmetic over a recipe's settings and its models' sizes. The update's lines are held by measurements on the
CPU (tests/smopd/plan); the other columns are sums of tensors that are known, and of the assumptions named
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smopd.config.settings import Settings
from smopd.engine.vllm.engines import SAMPLES
from smopd.kernels.head.chunks import CHUNK_BYTES
from smopd.plan.engines import Asked, Made, asked, make
from smopd.plan.machine import COLUMNS, GIB, RUNNING, WIDTHS, Machine, Need, Shape, trained_parameters
from smopd.plan.memory import (
    FP32,
    KNOWN_LAYERS,
    MicroBatch,
    Training,
    layer_forward,
    logits_chunk,
    update_moments,
    zero_buffers,
)
from smopd.plan.models import Models, ModelSizes

MASTERS, BESIDE = "parameters, fp32 masters", "parameters beside them"
Runs = Sequence[tuple[Settings, Models]]
"""Resolved settings and models of each."""


@dataclass(frozen=True)
class Sync:
    """One publication of the weights, for one GPU."""

    bytes: int
    bandwidth: float
    note: str

    @property
    def seconds(self) -> float:
        return self.bytes / self.bandwidth


@dataclass(frozen=True)
class Budget:
    needs: tuple[Need, ...]
    sync: Sync
    usable: int
    """Bytes of a GPU, the reserve taken off."""
    notes: tuple[str, ...] = ()

    @property
    def totals(self) -> dict[str, int]:
        return {column: sum(need.bytes.get(column, 0) for need in self.needs) for column in COLUMNS}

    @property
    def over(self) -> int:
        """Bytes that do not fit, summed over the columns."""
        return sum(max(0, total - self.usable) for total in self.totals.values())

    @property
    def fits(self) -> bool:
        return self.over == 0


def budget(settings: Settings, models: Models, machine: Machine, earlier: Runs = ()) -> Budget:
    """What one run (resolved settings) needs on each GPU.

    Args:
        earlier: the runs before it, in the same process, whose engines are still there.
    Raises:
        ValueError: a setting does not go with the model or the number of GPUs.
    """
    shape = Shape.of(settings, machine)
    if 0 < models.student.positions < shape.longest:
        raise ValueError(
            f"model: has {models.student.positions} positions, expected {shape.longest} for a prompt and "
            "its response (data.max_prompt_tokens, rollout.max_new_tokens, and evaluation's)"
        )
    trained, moment = _student(settings, models.student, machine, shape)
    made: list[Made] = []
    for own, theirs in (*earlier, (settings, models)):
        free = machine.memory - machine.reserve - _begun(own, theirs.student, machine)
        made = make(asked(own, theirs), made, free, machine.memory)
    engines = engine_needs(settings, models, shape, asked(settings, models), made)
    notes = [
        f"update: at its widest moment, {moment}; micro-batches of {shape.batch.tokens:,} positions",
        "host memory while the model loads, a whole fp32 copy a rank: "
        f"{FP32 * models.student.parameters * min(machine.gpus, machine.per_node) / GIB:.0f} GiB a node",
    ]
    if models.student.kind not in KNOWN_LAYERS:
        notes.append(f"activations: as of Llama's layers, this model's are {models.student.kind}'s")
    if settings.student.offload_optimizer:
        count = trained_parameters(settings, models.student)
        host = 4 * FP32 * count / shape.shards * min(machine.gpus, machine.per_node)
        notes.append(f"masters, gradients and optimiser state in host memory: {host / GIB:.0f} GiB a node")
    return Budget(
        needs=tuple(need for need in (*trained, *engines, *_scorers(models)) if any(need.bytes.values())),
        sync=_sync(settings, models.student, shape, machine),
        usable=machine.memory - machine.reserve,
        notes=tuple(notes),
    )


def _student(settings: Settings, sizes: ModelSizes, machine: Machine, shape: Shape) -> tuple[list[Need], str]:
    """The student's lines, and which moment of the update is the widest."""
    student = settings.student
    width = WIDTHS[student.compute_dtype]
    trained = trained_parameters(settings, sizes)
    training = Training(
        width=width,
        shards=shape.shards,
        chunk_bytes=student.head_chunk_bytes or CHUNK_BYTES,
        checkpointing=student.gradient_checkpointing,
        adapter=None if trained == sizes.parameters else trained,
    )
    moments = update_moments(sizes, shape.batch, training)
    states = {"masters": FP32 * trained, "optimizer": 2 * FP32 * trained, "gradients": FP32 * trained}
    frozen = 0 if training.adapter is None else width * sizes.parameters
    loaded = frozen + FP32 * trained
    parts, note = shape.shards, f"1/{shape.shards}"
    if student.strategy != "fsdp2":
        stage = student.zero_stage
        parts, note = machine.gpus, f"ZeRO-{stage}, 1/{machine.gpus}"
        frozen = width * sizes.parameters * (parts if stage == 2 else 1)
        moments = {
            name: {**held, **zero_buffers(sizes, training, stage)}
            for name, held in moments.items()
            if "activations" in held
        }
    if settings.student.offload_optimizer:
        states, note = dict.fromkeys(states, 0), "in host memory"
    held = {name: -(-value // parts) for name, value in states.items()}
    moment, widest = max(moments.items(), key=lambda item: sum(item[1].values()))
    needs = [
        Need("model as it is loaded", {"start": loaded}, "whole, before it is sharded"),
        Need(MASTERS, dict.fromkeys(RUNNING, held["masters"]), note),
        Need(BESIDE, dict.fromkeys(RUNNING, -(-frozen // parts)), student.compute_dtype),
        Need("optimizer, AdamW in fp32", dict.fromkeys(RUNNING, held["optimizer"]), note),
        Need("gradients, fp32", {"update": held["gradients"]}, note),
    ]
    notes = {
        "whole parameters": f"in {student.compute_dtype}: root and up to two layers",
        "activations": "checkpointed" if student.gradient_checkpointing else "not checkpointed",
        "logits": "one chunk of the fused head",
    }
    needs += [Need(name, {"update": value}, notes.get(name, "")) for name, value in widest.items()]
    return needs, moment


def _begun(settings: Settings, sizes: ModelSizes, machine: Machine) -> int:
    """What the student holds when the engines are made: AdamW's states come with the first update."""
    needs, _ = _student(settings, sizes, machine, Shape.of(settings, machine))
    return sum(need.bytes["rollout"] for need in needs if need.what in (MASTERS, BESIDE))


def _sync(settings: Settings, sizes: ModelSizes, shape: Shape, machine: Machine) -> Sync:
    """Every shard goes to every rank of its group as it is stored; servers elsewhere get the whole model.

    Adapters are fp32 and their base is in the compute dtype; layers are merged in fp32.
    """
    inside, urls = shape.shards <= machine.per_node, settings.rollout.urls
    stored, merged, what = FP32 * sizes.parameters, FP32 * sizes.parameters, "all parameters in fp32"
    if settings.student.lora is not None:
        width, adapters = WIDTHS[settings.student.compute_dtype], FP32 * trained_parameters(settings, sizes)
        stored, what = adapters, "adapters in fp32"
        if urls or settings.rollout.engine == "local":
            stored, what = width * sizes.parameters + adapters, "all parameters, adapters merged"
            merged = merged - (FP32 - width) * sizes.root_parameters
    gathered = stored * (shape.shards - 1) // shape.shards
    if urls:
        width = FP32 if settings.student.lora is None else WIDTHS[settings.student.compute_dtype]
        merged += width * sizes.head_parameters * sizes.tied  # under both its names
        sent = f"{what}, gathered and sent to {len(urls)} servers"
        return Sync(gathered + merged * len(urls), machine.between, sent)
    where = "within a node" if inside else "between nodes"
    return Sync(gathered, machine.inside if inside else machine.between, f"{what}, gathered {where}")


SAMPLING_WIDTH = 4 + 8 + 8  # draw's log-probabilities, their exponentials, cumulative sums
TOPK_WIDTH = 4 + 4  # an id and a log-probability


def engine_needs(
    settings: Settings, models: Models, shape: Shape, wanted: Sequence[Asked], made: Sequence[Made]
) -> list[Need]:
    """Rollouts, teachers, and the reference policy where it is a model of its own.

    Args:
        wanted: this run's engines.
        made: those that are there, earlier runs' included.
    """
    keys = [one.key for one in wanted]
    own = [one for one in made if one.asked.key in keys]
    sampling = [one for one in own if one.asked.role == SAMPLES]
    scoring = [one for one in own if one.asked.role != SAMPLES]
    left = sum(one.total for one in made if one.asked.key not in keys and not one.sleeps)
    return [
        *_rollouts(settings, models.student, shape, sampling),
        *_teachers(settings, models, shape, scoring),
        Need("engines of earlier runs", dict.fromkeys(RUNNING, left), "cannot sleep"),
    ]


def _rollouts(settings: Settings, sizes: ModelSizes, shape: Shape, engines: Sequence[Made]) -> list[Need]:
    rollout = settings.rollout
    if rollout.engine == "local" and not rollout.urls:
        return _local_rollouts(settings, sizes, shape)
    needs = []
    for one in engines:
        parallel = rollout.vllm.tensor_parallel_size
        awake = ("rollout", "sync") if one.sleeps and not settings.loop.lag else RUNNING
        response = one.asked.model.kv_bytes(one.asked.width, parallel) * shape.longest
        wanted = parallel * shape.responses
        at_once = f"{min(one.taken.cache // response, wanted)} of {wanted} responses at once"
        needs += [
            Need("rollout weights", dict.fromkeys(awake, one.weights), f"tensor parallel {parallel}"),
            Need("KV cache", dict.fromkeys(awake, one.taken.cache), at_once),
            Need("vLLM's work", dict.fromkeys(awake, one.taken.work), "assumed"),
        ]
    return needs


def _scorers(models: Models) -> list[Need]:
    """Of the rewards' processes, which keep what they have once used."""
    weights = work = 0
    for one in models.scorers:
        width, rows = one.sizes.stored.itemsize, max(1, one.batch_tokens // one.longest)
        weights += width * one.parameters
        batch = MicroBatch(one.batch_tokens, rows * one.longest**2, one.batch_tokens)
        work += layer_forward(one.sizes, batch, width)
    note = f"{len(models.scorers)}, in the rewards' processes, as stored"
    return [
        Need("preference models", dict.fromkeys(RUNNING, weights), note),
        Need("preference models' forward", dict.fromkeys(RUNNING, work), "a layer"),
    ]


def _local_rollouts(settings: Settings, sizes: ModelSizes, shape: Shape) -> list[Need]:
    rollout = settings.rollout
    width = WIDTHS[rollout.dtype]
    sampling = RUNNING if settings.loop.lag else ("rollout",)  # with a lag, beside all the rest
    group = rollout.group_size * shape.longest
    positions = min(shape.responses * shape.longest, max(rollout.max_batch_tokens, group))
    rows = max(rollout.group_size, positions // shape.longest)
    cache = sizes.kv_bytes(width) * positions
    grown = cache // (2 * sizes.layers)  # a layer's keys are copied as they grow
    draws = rows * sizes.vocabulary * (width + SAMPLING_WIDTH)
    return [
        Need("rollout weights", dict.fromkeys(RUNNING, width * sizes.parameters), "a whole copy"),
        Need("KV cache", dict.fromkeys(sampling, cache + grown), f"{positions:,} positions"),
        Need("sampling", dict.fromkeys(sampling, draws), f"{rows} responses at once"),
    ]


def _teachers(settings: Settings, models: Models, shape: Shape, engines: Sequence[Made]) -> list[Need]:
    teachers = settings.teachers
    held = [*models.teachers, *([] if models.reference is None else [models.reference])]
    tokens = shape.responses * settings.rollout.max_new_tokens
    support = settings.opd.kappa * (models.n_teachers if settings.unites else 1)
    topk = tokens * models.n_teachers * (support * TOPK_WIDTH + FP32)
    needs = [Need("teachers' top-kappa", {"teachers": topk, "update": topk}, f"kappa {settings.opd.kappa}")]
    if not held:
        return needs
    of_product = settings.opd.support == "product" and models.n_teachers > 0
    count = f"{models.n_teachers - of_product} teachers" + ", their product's reference" * of_product
    count += ", the reference policy" * (models.reference is not None)
    if teachers.engine == "local":
        width = WIDTHS[teachers.dtype]
        training = Training(width, 1, CHUNK_BYTES)
        whole = width * (sum(sizes.parameters for sizes in held) + models.adapter_parameters)
        work = max(
            layer_forward(sizes, shape.batch, width)
            + 2 * width * shape.batch.responses * sizes.hidden
            + logits_chunk(sizes, shape.batch.responses, training)[0]
            for sizes in held
        )
        return [
            Need("teachers' weights", dict.fromkeys(RUNNING, whole), count),
            Need("teachers' forward", {"teachers": work}, "a layer, a chunk of logits"),
            *needs,
        ]
    always = [one for one in engines if not one.sleeps]
    in_turn = [one for one in engines if one.sleeps]
    at_work = [*always, *([max(in_turn, key=lambda one: one.total)] if in_turn else [])]
    note = f"{count}, {len(engines)} engine" + "s" * (len(engines) > 1)

    def columns(part: str) -> dict[str, int]:
        def held_by(some: Sequence[Made]) -> int:
            return sum(one.weights if part == "weights" else getattr(one.taken, part) for one in some)

        return {**dict.fromkeys(RUNNING, held_by(always)), "teachers": held_by(at_work)}

    return [
        Need("teachers' weights", columns("weights"), note + ", one awake at a time" * (len(in_turn) > 1)),
        Need("teachers' KV cache", columns("cache"), "a batch and a sequence each, or as set"),
        Need("teachers' vLLM work", columns("work"), "assumed"),
        *needs,
    ]
