"""Settings of earlier versions, and where each is now: the answer to an old recipe or command line."""

from __future__ import annotations

from typing import Any

from smopd.config.recipe import Keys

RENAMED = {
    "log.to": "log.trackers",
    "loop.lag": "loop.async_level",
    "opd.watch": "opd.log_when_off",
    "opd.support": "opd.target; `product` is merge.method: product",
    "opd.product.keep_raised": "opd.product.protect_above",
    "opd.product.path_floor": "opd.product.prefix_floor",
    "merge.models.N.may_lose": "merge.models.N.max_regression",
    "merge.models.N.leave_out": "merge.models.N.exclude",
}
"""Setting -> its name now."""

_VLLM = {
    "tensor_parallel_size": "tensor_parallel_size",
    "max_model_len": "max_model_len",
    "gpu_memory_share": "gpu_memory_utilization",
    "kv_cache_bytes": "kv_cache_memory_bytes",
    "enforce_eager": "enforce_eager",
    "sleep": "enable_sleep_mode",
}
RENAMED |= {
    f"{section}.vllm.{old}": f"{section}.vllm.engine_kwargs.{new}"
    for section in ("rollout", "teachers")
    for old, new in _VLLM.items()
}
_SOURCES = ("data.train", "data.evaluation", "warm_start.source")
RENAMED |= {f"{source}.split": f"{source}.kwargs.split" for source in _SOURCES}
RENAMED |= {f"{source}.prompt_column": "data.prompt_column" for source in _SOURCES}

_GATES = "it is a constant of smopd/gates.py"
REMOVED = {
    "scoring.startup_seconds": "it is STARTUP_SECONDS of smopd/names.py",
    "scoring.window_steps": "it is WINDOW_STEPS of smopd/step/rewards.py",
    "warm_start.max_tokens": "drop longer rows with warm_start.source.map",
    "opd.product.clip": "a teacher's change of a token counts whole",
    "opd.gate.confidence_exponent": _GATES,
    "opd.gate.failure_exponent": _GATES,
    "opd.gate.confidence_floor": _GATES,
    "opd.gate.blend": _GATES,
    "opd.gate.eps": _GATES,
    "teachers.route": "vLLM's pooler serves every head that it can apply",
    "teachers.vllm.transfer": "teachers' weights are read from files",
    "remote.retries": "it is a default of RetryPolicy in engine/remote/servers.py",
    "remote.concurrency": "it is a default of RetryPolicy in engine/remote/servers.py",
    "remote.transfer_folder": "set SMOPD_TRANSFER_FOLDER in the environment",
    "remote.logprobs_dtype": "it is float32",
    "student.row_tokens": "rows are as long as their longest sequence",
    "student.head_chunk_bytes": "it is CHUNK_BYTES of the fused head",
    "student.max_skipped_updates": "it is MAX_SKIPPED_UPDATES of engine/student/student.py",
    "loop.timeout_seconds": "it is TRAINING_SECONDS of smopd/config/settings.py",
    "log.plain": "lines are plain where the output is no terminal",
    "merge.models.N.scale": "a change counts once; python -m smopd.merge --scale writes another merge",
}
"""Setting -> what holds in its place."""

CONTROL = "is train now"
MERGED_INIT = "is the name of a run; a merge of weights is stage: merge, set: {merge: {models, rule, guard}}"


def renamed(keys: Keys, value: Any) -> str | None:
    """What to say of a setting or value that an earlier version had; None of any other.

    Args:
        keys: the way to the setting, `runs.NAME.set` before it or not.
        value: what was given.
    """
    if keys[:1] == ("runs",):
        keys = keys[3:] if keys[2:3] == ("set",) else ("runs", "NAME", *keys[2:])
    path = ".".join("N" if isinstance(key, int) else str(key) for key in keys)
    if path in RENAMED:
        return f"is called {RENAMED[path]} now"
    if path in REMOVED:
        return f"is no setting any more: {REMOVED[path]}"
    if path == "runs.NAME.stage" and value == "control":
        return CONTROL
    return MERGED_INIT if path == "runs.NAME.init" and isinstance(value, dict) else None
