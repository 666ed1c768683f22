"""What a run needs on each GPU: memory line by line and moment by moment, and the traffic of a weight sync.

Arithmetic over a recipe's settings and its models' sizes. The update's lines are held by measurements on the
CPU (tests/smopd/test_plan.py); the other columns are sums of tensors that are known, and of the assumptions
named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smopd.config import Settings
from smopd.engine.types import VllmSettings
from smopd.engine.vllm import memory_share
from smopd.engine_sections import Vllm
from smopd.kernels.linear_job import CHUNK_BYTES
from smopd.memory import (
    FP32,
    KNOWN_LAYERS,
    MicroBatch,
    Training,
    layer_forward,
    logits_chunk,
    update_moments,
    zero_buffers,
)
from smopd.sizes import Models, ModelSizes

GIB = 1 << 30
RUNNING = ("rollout", "teachers", "update", "sync")
COLUMNS = ("start", *RUNNING)
WIDTHS = {"float32": 4, "bfloat16": 2}
VLLM_WORK = 2 * GIB  # assumed: CUDA graphs and the largest forward of one vLLM engine
SAMPLING_WIDTH = 4 + 8 + 8  # smopd.engine.local.draw: log-probabilities, their exponentials, cumulative sums
TOPK_WIDTH = 4 + 4  # an id and a log-probability


@dataclass(frozen=True)
class Machine:
    """What the run is to fit on. Bandwidths are what one GPU receives, in bytes a second; all assumed."""

    gpus: int
    memory: int
    """Bytes a GPU."""
    per_node: int = 8
    reserve: int = 3 * GIB
    """Of each GPU: CUDA context, NCCL's buffers, what the allocator cannot reuse."""
    inside: float = 200e9
    """Within a node."""
    between: float = 40e9
    """Between nodes."""


@dataclass(frozen=True)
class Need:
    """One line: bytes on a GPU by column."""

    what: str
    bytes: Mapping[str, int]
    note: str = ""


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


def budget(settings: Settings, models: Models, machine: Machine) -> Budget:
    """What one run (resolved settings) needs on each GPU.

    Raises:
        ValueError: a setting does not go with the model or the number of GPUs.
    """
    shape = _Shape.of(settings, machine)
    if 0 < models.student.positions < shape.longest:
        raise ValueError(
            f"rollout.max_new_tokens: {settings.rollout.max_new_tokens} behind prompts of "
            f"{shape.longest - settings.rollout.max_new_tokens} tokens is over the model's "
            f"{models.student.positions} positions"
        )
    trained, moment = _student(settings, models.student, machine, shape)
    resident = {column: sum(need.bytes.get(column, 0) for need in trained) for column in COLUMNS}
    scored = _teachers(settings, models, shape, resident, machine)
    for column in COLUMNS:
        resident[column] += sum(need.bytes.get(column, 0) for need in scored)
    sampled = _rollouts(settings, models.student, shape, resident, machine)
    notes = [
        f"update: at its widest moment, {moment}; micro-batches of {shape.batch.tokens:,} positions",
        "host memory while the model loads, a whole fp32 copy a rank: "
        f"{FP32 * models.student.parameters * min(machine.gpus, machine.per_node) / GIB:.0f} GiB a node",
    ]
    if models.student.kind not in KNOWN_LAYERS:
        notes.append(f"activations: as of Llama's layers, this model's are {models.student.kind}'s")
    if settings.student.offload_optimizer:
        count = _trained(settings, models.student)
        host = 4 * FP32 * count / shape.shards * min(machine.gpus, machine.per_node)
        notes.append(f"masters, gradients and optimiser state in host memory: {host / GIB:.0f} GiB a node")
    return Budget(
        needs=tuple(need for need in (*trained, *sampled, *scored) if any(need.bytes.values())),
        sync=_sync(settings, models.student, shape, machine),
        usable=machine.memory - machine.reserve,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Shape:
    """What the settings say of a rank's share."""

    shards: int
    batch: MicroBatch
    longest: int
    """Positions of the longest prompt with its longest response."""
    responses: int
    """Of a step, on this rank."""
    masked: bool

    @classmethod
    def of(cls, settings: Settings, machine: Machine) -> _Shape:
        student, rollout, loop = settings.student, settings.rollout, settings.loop
        shards = student.shard_size or machine.gpus
        if shards > machine.gpus or machine.gpus % shards:
            raise ValueError(f"student.shard_size: got {shards}, expected a divisor of {machine.gpus} GPUs")
        prompt, answer, budget_ = (
            settings.data.max_prompt_tokens,
            rollout.max_new_tokens,
            student.micro_batch_tokens,
        )
        members = 1
        if student.share_prompts:
            members = max(1, min(rollout.group_size, (budget_ - prompt) // max(1, answer - 1)))
        unit = prompt + members * (answer - 1)
        length = max(unit, student.row_tokens)
        prompts = -(-loop.prompts_per_step // machine.gpus)
        units = -(-loop.prompts_per_step // (machine.gpus * loop.updates_per_step))
        units *= -(-rollout.group_size // members)
        tokens = min(max(budget_, length), units * length)
        masked = student.share_prompts or student.attention == "sdpa"
        rows = min(max(1, budget_ // length), units)
        batch = MicroBatch(tokens, rows * length * length if masked else 0, tokens)
        longest = settings.data.longest_prompt + answer
        return cls(shards, batch, longest, prompts * rollout.group_size, masked)


def _student(
    settings: Settings, sizes: ModelSizes, machine: Machine, shape: _Shape
) -> tuple[list[Need], str]:
    """The student's lines, and which moment of the update is the widest."""
    student = settings.student
    width = WIDTHS[student.compute_dtype]
    trained = _trained(settings, sizes)
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
        Need("parameters, fp32 masters", dict.fromkeys(RUNNING, held["masters"]), note),
        Need("parameters beside them", dict.fromkeys(RUNNING, -(-frozen // parts)), student.compute_dtype),
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


def _rollouts(
    settings: Settings, sizes: ModelSizes, shape: _Shape, resident: Mapping[str, int], machine: Machine
) -> list[Need]:
    rollout = settings.rollout
    if rollout.urls:
        return []
    width = WIDTHS[rollout.dtype]
    sampling = RUNNING if settings.loop.lag else ("rollout",)  # with a lag, beside all the rest
    if rollout.engine == "local":
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
    parallel = rollout.vllm.tensor_parallel_size
    weights = -(-width * sizes.parameters // parallel)
    response = sizes.kv_bytes(width) * shape.longest // parallel
    wanted = parallel * shape.responses
    sleeps = rollout.vllm.sleep
    cache = _cache(rollout.vllm, weights, response * wanted, response, resident["rollout"], machine, sleeps)
    awake = ("rollout", "sync") if sleeps and not settings.loop.lag else RUNNING
    at_once = min(cache // response, wanted)
    return [
        Need("rollout weights", dict.fromkeys(awake, weights), f"tensor parallel {parallel}"),
        Need("KV cache", dict.fromkeys(awake, cache), f"{at_once} of {wanted} responses at once"),
        Need("vLLM's work", dict.fromkeys(awake, VLLM_WORK), "assumed"),
    ]


def _cache(
    engine: Vllm, weights: int, wanted: int, least: int, resident: int, machine: Machine, sleeps: bool
) -> int:
    """vLLM's KV cache: as set, or what its share of the GPU leaves; one response at least."""
    if engine.kv_cache_bytes is not None:
        return engine.kv_cache_bytes
    if engine.gpu_memory_share is not None:
        return max(least, int(engine.gpu_memory_share * machine.memory) - weights - VLLM_WORK)
    free = max(0, machine.memory - machine.reserve - resident)
    share = memory_share(VllmSettings(), free, machine.memory, sleeps)
    return max(least, min(wanted, int(share * machine.memory) - weights - VLLM_WORK))


def _teachers_sleep(settings: Settings, n_engines: int) -> bool:
    """Whether they leave the GPU between scorings: of the engines in one process a single one can."""
    own, rollout = settings.teachers.vllm, settings.rollout
    here = rollout.engine == "vllm" and not rollout.urls and rollout.vllm.placement == "colocated"
    taken = (here and rollout.vllm.sleep) or n_engines > 1
    return own.sleep and (own.placement == "process" or not taken)


def _teachers(
    settings: Settings, models: Models, shape: _Shape, resident: Mapping[str, int], machine: Machine
) -> list[Need]:
    """The teachers, and the reference policy where it is a model of its own."""
    teachers = settings.teachers
    reference = [] if models.reference is None else [models.reference]
    held = [*models.teachers, *reference]
    width = WIDTHS[teachers.dtype]
    tokens = shape.responses * settings.rollout.max_new_tokens
    support = settings.opd.kappa * (models.n_teachers if teachers.union else 1)
    topk = tokens * models.n_teachers * (support * TOPK_WIDTH + FP32)
    needs = [Need("teachers' top-kappa", {"teachers": topk, "update": topk}, f"kappa {settings.opd.kappa}")]
    if not held:
        return needs
    adapters = width * models.adapter_parameters
    count = f"{models.n_teachers} teachers" + ", the reference policy" * len(reference)
    if teachers.engine == "local":
        training = Training(width, 1, CHUNK_BYTES)
        whole = width * sum(sizes.parameters for sizes in held) + adapters
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
    parallel = teachers.vllm.tensor_parallel_size
    most = teachers.vllm.engines or len(models.teachers)
    kinds = {(i % most, s.kind, s.parameters): s for i, s in enumerate(models.teachers)}
    engines = [*kinds.values(), *reference]  # whose role is its own
    whole = -(-(width * sum(sizes.parameters for sizes in engines) + adapters) // parallel)
    response = max(sizes.kv_bytes(width) for sizes in engines) * shape.longest // parallel
    sleeps = _teachers_sleep(settings, len(engines))
    cache = _cache(teachers.vllm, whole, response, response, resident["teachers"], machine, sleeps)
    awake = ("teachers",) if sleeps else RUNNING
    note = f"{count}, {len(engines)} engine" + "s" * (len(engines) > 1)
    return [
        Need("teachers' weights", dict.fromkeys(awake, whole), note),
        Need("teachers' KV cache", dict.fromkeys(awake, cache), "one response at least"),
        Need("teachers' vLLM work", dict.fromkeys(awake, VLLM_WORK * len(engines)), "assumed"),
        *needs,
    ]


def _sync(settings: Settings, sizes: ModelSizes, shape: _Shape, machine: Machine) -> Sync:
    """Every shard goes to every rank of its group as it is stored; servers elsewhere get the whole model.

    Adapters are fp32 and their base is in the compute dtype; layers are merged in fp32.
    """
    inside, urls = shape.shards <= machine.per_node, settings.rollout.urls
    stored, merged, what = FP32 * sizes.parameters, FP32 * sizes.parameters, "all parameters in fp32"
    if settings.student.lora is not None:
        width, adapters = WIDTHS[settings.student.compute_dtype], FP32 * _trained(settings, sizes)
        stored, what = adapters, "adapters in fp32"
        if urls or settings.rollout.engine == "local":
            stored, what = width * sizes.parameters + adapters, "all parameters, adapters merged"
            merged = merged - (FP32 - width) * sizes.root_parameters
    gathered = stored * (shape.shards - 1) // shape.shards
    if urls:
        sent = f"{what}, gathered and sent to {len(urls)} servers"
        return Sync(gathered + merged * len(urls), machine.between, sent)
    where = "within a node" if inside else "between nodes"
    return Sync(gathered, machine.inside if inside else machine.between, f"{what}, gathered {where}")


def _trained(settings: Settings, sizes: ModelSizes) -> int:
    lora = settings.student.lora
    return sizes.parameters if lora is None else sizes.lora_parameters(lora.rank, lora.targets)
