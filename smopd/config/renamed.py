"""Error messages for settings of earlier versions."""

from __future__ import annotations

from typing import Any

from smopd.config.recipe import Keys

_CONSTANT = "was removed; it is a constant now, in"
ANSWERS = {
    "log.to": "is now log.trackers",
    "log.plain": "was removed: output that is no terminal gets plain lines",
    "loop.lag": "is now loop.async_level",
    "loop.timeout_seconds": f"{_CONSTANT} smopd/config/settings.py: TRAINING_SECONDS",
    "data.system": "was removed: add the system message with data.train.map",
    "advantage.norm_eps": f"{_CONSTANT} smopd/ops.py",
    "scoring.startup_seconds": f"{_CONSTANT} smopd/names.py: STARTUP_SECONDS",
    "scoring.window_steps": f"{_CONSTANT} smopd/step/rewards.py: WINDOW_STEPS",
    "warm_start.max_tokens": "was removed: drop long rows with warm_start.source.map",
    "opd.watch": "was removed: teachers always score, also at lambda 0",
    "opd.log_when_off": "was removed: teachers always score, also at lambda 0",
    "opd.support": "is now opd.target; `product` is merge.method: product",
    "opd.reverse_kl_surrogate": "was removed: the surrogate is the paper's",
    "opd.product.keep_raised": "is now opd.product.protect_above",
    "opd.product.path_floor": "was removed: it never helped",
    "opd.product.prefix_floor": "was removed: it never helped",
    "opd.product.clip": "was removed: changes are not clipped",
    "merge.models.N.may_lose": "is now merge.models.N.max_regression",
    "merge.models.N.leave_out": "is now merge.models.N.exclude",
    "merge.models.N.scale": "was removed: use smopd merge --scale",
    "evaluation.temperature": "was removed: it is 1",
    "evaluation.top_p": "was removed: it is 1",
    "evaluation.max_new_tokens": "was removed: it is rollout.max_new_tokens",
    "kl_ref.place": "was removed: it is a term of the loss",
    "kl_ref.model": "was removed: it is the model that the run starts from",
    "teachers.route": "was removed: the vLLM pooler serves every head it can apply",
    "teachers.vllm.transfer": "was removed: teachers' weights are read from files",
    "rollout.vllm.transfer": "is now rollout.transfer",
    "rollout.top_p": "was removed: it is 1, so that sampled log-probabilities are those of the policy",
    "remote": "was removed: transfer is now rollout.transfer, the folder is SMOPD_TRANSFER_FOLDER",
    "student.row_tokens": "was removed: rows are as long as their longest sequence",
    "student.head_chunk_bytes": f"{_CONSTANT} kernels/head.py: CHUNK_BYTES",
    "student.max_skipped_updates": f"{_CONSTANT} engine/student/student.py: MAX_SKIPPED_UPDATES",
}
"""Setting -> the rest of the message."""

for _section in ("rollout", "teachers"):
    for _old, _new in {
        "tensor_parallel_size": "tensor_parallel_size",
        "max_model_len": "max_model_len",
        "gpu_memory_share": "gpu_memory_utilization",
        "kv_cache_bytes": "kv_cache_memory_bytes",
        "enforce_eager": "enforce_eager",
        "sleep": "enable_sleep_mode",
    }.items():
        ANSWERS[f"{_section}.vllm.{_old}"] = f"is now {_section}.vllm.engine_kwargs.{_new}"
for _source in ("data.train", "data.evaluation", "warm_start.source"):
    ANSWERS[f"{_source}.split"] = f"is now {_source}.kwargs.split"
    ANSWERS[f"{_source}.prompt_column"] = "is now data.prompt_column"
    ANSWERS[f"{_source}.limit"] = f"was removed: use {_source}.kwargs, such as {{split: 'train[:100]'}}"
for _name in ("confidence_exponent", "failure_exponent", "confidence_floor", "blend", "eps"):
    ANSWERS[f"opd.gate.{_name}"] = f"{_CONSTANT} smopd/gates.py"


def renamed(keys: Keys, value: Any) -> str | None:
    """Return the message for a setting or value of an earlier version, None for any other."""
    path = ".".join("N" if isinstance(key, int) else str(key) for key in keys)
    if keys[:1] == ("runs",) and keys[2:] == ("stage",) and value == "control":
        return "is now train"
    if keys[:1] == ("runs",) and keys[2:] == ("init",) and isinstance(value, dict):
        return (
            "must be the name of a run; for a weight merge use stage: merge and set: {merge: {models: ...}}"
        )
    return ANSWERS.get(path)
