"""Settings of earlier versions, and what holds now: the answer to an old recipe or command line."""

from __future__ import annotations

from typing import Any

from smopd.config.recipe import Keys

_CONSTANT = "is no setting any more: it is a constant of"
_FIXED = "is no setting any more:"
ANSWERS = {
    "log.to": "is called log.trackers now",
    "log.plain": f"{_FIXED} lines are plain where the output is no terminal",
    "loop.lag": "is called loop.async_level now",
    "loop.timeout_seconds": f"{_CONSTANT} smopd/config/settings.py, TRAINING_SECONDS",
    "data.system": f"{_FIXED} put it before the prompts with data.train.map",
    "advantage.norm_eps": f"{_FIXED} it is the default of the operations in smopd/ops.py",
    "scoring.startup_seconds": f"{_CONSTANT} smopd/names.py, STARTUP_SECONDS",
    "scoring.window_steps": f"{_CONSTANT} smopd/step/rewards.py, WINDOW_STEPS",
    "warm_start.max_tokens": f"{_FIXED} drop longer rows with warm_start.source.map",
    "opd.watch": f"{_FIXED} teachers are asked at lambda 0 too",
    "opd.log_when_off": f"{_FIXED} teachers are asked at lambda 0 too",
    "opd.support": "is called opd.target now; `product` is merge.method: product",
    "opd.reverse_kl_surrogate": f"{_FIXED} it is the paper's",
    "opd.product.keep_raised": "is called opd.product.protect_above now",
    "opd.product.path_floor": "is called opd.product.prefix_floor now",
    "opd.product.clip": f"{_FIXED} a teacher's change of a token counts whole",
    "merge.models.N.may_lose": "is called merge.models.N.max_regression now",
    "merge.models.N.leave_out": "is called merge.models.N.exclude now",
    "merge.models.N.scale": f"{_FIXED} python -m smopd.merge --scale writes such a merge",
    "evaluation.temperature": f"{_FIXED} it is 1",
    "evaluation.top_p": f"{_FIXED} it is 1",
    "evaluation.max_new_tokens": f"{_FIXED} it is rollout.max_new_tokens",
    "kl_ref.place": f"{_FIXED} it is a term of the loss",
    "kl_ref.model": f"{_FIXED} it is what the run starts from",
    "teachers.route": f"{_FIXED} vLLM's pooler serves every head that it can apply",
    "teachers.vllm.transfer": f"{_FIXED} teachers' weights are read from files",
    "rollout.vllm.transfer": "is called rollout.transfer now",
    "remote": f"{_FIXED} transfer is rollout.transfer now, the folder SMOPD_TRANSFER_FOLDER",
    "student.row_tokens": f"{_FIXED} rows are as long as their longest sequence",
    "student.head_chunk_bytes": f"{_CONSTANT} the fused head, CHUNK_BYTES",
    "student.max_skipped_updates": f"{_CONSTANT} engine/student/student.py, MAX_SKIPPED_UPDATES",
}
"""Setting -> what to say of it."""

for _section in ("rollout", "teachers"):
    for _old, _new in {
        "tensor_parallel_size": "tensor_parallel_size",
        "max_model_len": "max_model_len",
        "gpu_memory_share": "gpu_memory_utilization",
        "kv_cache_bytes": "kv_cache_memory_bytes",
        "enforce_eager": "enforce_eager",
        "sleep": "enable_sleep_mode",
    }.items():
        ANSWERS[f"{_section}.vllm.{_old}"] = f"is called {_section}.vllm.engine_kwargs.{_new} now"
for _source in ("data.train", "data.evaluation", "warm_start.source"):
    ANSWERS[f"{_source}.split"] = f"is called {_source}.kwargs.split now"
    ANSWERS[f"{_source}.prompt_column"] = "is called data.prompt_column now"
    ANSWERS[f"{_source}.limit"] = (
        f"{_FIXED} `split: train[:100]` in {_source}.kwargs, or a function's argument"
    )
for _name in ("confidence_exponent", "failure_exponent", "confidence_floor", "blend", "eps"):
    ANSWERS[f"opd.gate.{_name}"] = f"{_CONSTANT} smopd/gates.py"


def renamed(keys: Keys, value: Any) -> str | None:
    """What to say of a setting or value that an earlier version had; None of any other.

    Args:
        keys: the way to the setting in the recipe.
        value: what was given.
    """
    path = ".".join("N" if isinstance(key, int) else str(key) for key in keys)
    if keys[:1] == ("runs",) and keys[2:] == ("stage",) and value == "control":
        return "is train now"
    if keys[:1] == ("runs",) and keys[2:] == ("init",) and isinstance(value, dict):
        return "is the name of a run; a merge of weights is stage: merge, set: {merge: {models, rule, guard}}"
    return ANSWERS.get(path)
