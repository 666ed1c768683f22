"""The lines of a plan for what samples and what scores: embedded models, or vLLM's engines."""

from __future__ import annotations

from collections.abc import Sequence

from smopd.config import Settings
from smopd.engine.vllm.engines import SAMPLES
from smopd.kernels.head.chunks import CHUNK_BYTES
from smopd.machine import RUNNING, WIDTHS, Need, Shape
from smopd.memory import FP32, Training, layer_forward, logits_chunk
from smopd.planned_engines import Asked, Made
from smopd.sizes import Models, ModelSizes

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
    support = settings.opd.kappa * (models.n_teachers if teachers.union else 1)
    topk = tokens * models.n_teachers * (support * TOPK_WIDTH + FP32)
    needs = [Need("teachers' top-kappa", {"teachers": topk, "update": topk}, f"kappa {settings.opd.kappa}")]
    if not held:
        return needs
    count = f"{models.n_teachers} teachers" + ", the reference policy" * (models.reference is not None)
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
