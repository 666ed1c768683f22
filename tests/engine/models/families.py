"""Tiny random models of many families.

`python -m tests.engine.models.families docs/models.md` prints how each trains and fills the page's table.
"""

import logging
import sys
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from smopd.engine import distributed
from smopd.engine.errors import UnusableModel
from smopd.engine.local.rollout import LocalRollout
from smopd.engine.models.paths import native_attention, single_logps
from smopd.engine.settings import Lora, TrainSettings
from smopd.engine.student.student import Student
from smopd.engine.types import Rollout
from tests.engine.tiny import END, model_of, ragged_rollouts

WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 16}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
LOCAL, EXPERTS = ({name: 4, "num_experts_per_tok": 2} for name in ("num_local_experts", "num_experts"))
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED = ROUTED | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "head_dim"), 8)
OLD = {"n_embd": 64, "n_layer": 2, "num_attention_heads": 4, "n_positions": 256}
GLOBAL_AND_LOCAL = [[["global", "local"], 1]]
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [3.0] * 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
DELTA = {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
SHARED_EXPERT = {"num_experts": 4, "shared_expert_intermediate_size": 16}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16}
HYBRID = MAMBA | {"num_local_experts": 4}
CONVOLVED = {"layer_types": ["conv", "full_attention"]}
PLAIN = (
    "apertus", "arcee", "bitnet", "cohere", "ernie4_5",  "falcon", "gemma", "glm", "gpt_neox",
    "granite", "llama", "mistral", "nemotron", "olmo", "olmo2", "persimmon",
    "phi", "phi3", "qwen2", "qwen3", "smollm3", "stablelm",
)  # fmt: skip
TIED = {"tie_word_embeddings": True}
EXTENDED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "linear RoPE": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "YaRN": EXTENDED | {"rope_type": "yarn"},
    "llama3 RoPE": EXTENDED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
WINDOWS = ["cohere2", "gemma2", "gemma3_text", "ministral", "olmo3", "vaultgemma"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"sliding_window": None}) for name in PLAIN},
    **{f"{name}, tied": (name, TIED | {"sliding_window": None}) for name in PLAIN},
    **{name: (name, WINDOW) for name in WINDOWS},
    **{f"{name}, tied": (name, TIED | WINDOW) for name in WINDOWS},
    **{
        f"{name}, {rope}": (name, {"rope_parameters": given})
        for name in ("llama", "qwen3")
        for rope, given in ROPES.items()
    },
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1]}),
    "biogpt": ("biogpt", {"hidden_dropout_prob": 0.5}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 2}),
    "codegen": ("codegen", OLD | {"rotary_dim": 8}),
    "ctrl": ("ctrl", OLD | {"dff": 96}),
    "deepseek_v3": ("deepseek_v3", GROUPED | LATENT | {"v_head_dim": 16, "num_key_value_heads": 2}),
    "diffllama": ("diffllama", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}),
    "doge": ("doge", {"head_dim": 16}),
    "dots1": ("dots1", GROUPED | {"n_shared_experts": 1}),
    "ernie4_5_moe": ("ernie4_5_moe", ROUTED | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}),
    "exaone4, window": ("exaone4", WINDOW),
    "falcon_h1": ("falcon_h1", MAMBA | {"mamba_d_ssm": 128}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 8}),
    "flex_olmo": ("flex_olmo", EXPERTS),
    "gemma3": ("gemma3", {"text_config": WINDOW, "vision_config": VISION}),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4_moe": ("glm4_moe", GROUPED | {"head_dim": 16}),
    "gpt2": ("gpt2", OLD),
    "gpt_bigcode": ("gpt_bigcode", OLD),
    "gpt_neo": ("gpt_neo", {"num_layers": 2, "window_size": 8, "attention_types": GLOBAL_AND_LOCAL}),
    "gpt2, tied": ("gpt2", OLD | TIED),
    "gpt_oss": ("gpt_oss", WINDOW | LOCAL),
    "gptj": ("gptj", OLD | {"rotary_dim": 8}),
    "granitemoe": ("granitemoe", LOCAL),
    "helium": ("helium", {"head_dim": 32}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 32}),
    "jamba": ("jamba", {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "lfm2": ("lfm2", CONVOLVED),
    "llama, dynamic RoPE": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "llama4_text": (
        "llama4_text",
        {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8, "head_dim": 16}
        | {"num_local_experts": 2, "intermediate_size_mlp": 96},
    ),
    "mamba": ("mamba", {"state_size": 8}),
    "minimax": ("minimax", LINEAR | {"num_local_experts": 4, "block_size": 8}),
    "mistral, window": ("mistral", {"sliding_window": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mpt": ("mpt", {"d_model": 64, "n_layers": 2, "n_heads": 2, "max_seq_len": 256}),
    "olmoe": ("olmoe", EXPERTS),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.5}),
    "phi3, long RoPE": (
        "phi3",
        {"original_max_position_embeddings": 32, "sliding_window": None, "rope_parameters": LONG},
    ),
    "phi3, window": ("phi3", {"sliding_window": 8}),
    "phimoe": ("phimoe", {"num_local_experts": 4}),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2_moe": ("qwen2_moe", ROUTED | {"num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("qwen3_moe", ROUTED | {"num_experts": 4, "decoder_sparse_step": 1, "head_dim": 16}),
    "qwen3_5": ("qwen3_5_text", LINEAR | DELTA),
    "qwen3_next": ("qwen3_next", LINEAR | DELTA | ROUTED | SHARED_EXPERT),
    "recurrent_gemma": ("recurrent_gemma", {"lru_width": 64, "attention_window_size": 8, "head_dim": 32}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "residual_dropout": 0.5, "attention_dropout": 0.5}),
    "starcoder2": ("starcoder2", {"residual_dropout": 0.5, "sliding_window": 8}),
    "afmoe": ("afmoe", {}),
    "cwm": ("cwm", WINDOW),
    "deepseek_v2": ("deepseek_v2", GROUPED | LATENT | {"v_head_dim": 16, "num_key_value_heads": 2}),
    "gpt_oss, no window": ("gpt_oss", LOCAL | {"layer_types": ["full_attention"] * 2, "head_dim": 16}),
    "granitemoehybrid": ("granitemoehybrid", HYBRID | {"layer_types": ["mamba", "attention"]}),
    "granitemoeshared": ("granitemoeshared", LOCAL | {"shared_intermediate_size": 32}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "jetmoe": ("jetmoe", LOCAL | {"kv_channels": 16}),
    "lfm2_moe": ("lfm2_moe", CONVOLVED | ROUTED | {"num_experts": 4, "num_dense_layers": 1}),
    "llama, MQA": ("llama", {"num_key_value_heads": 1}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mamba2": ("mamba2", {"state_size": 8, "head_dim": 16, "num_heads": 8}),
    "minimax_m2": ("minimax_m2", LOCAL | {"head_dim": 16}),
    "ministral3": ("ministral3", {}),
    "nemotron_h": ("nemotron_h", {}),
    "solar_open": ("solar_open", GROUPED | {"head_dim": 16}),
    "xglm": ("xglm", {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 2, "dropout": 0.5}),
}


def family(name: str) -> PreTrainedModel:
    """Return a tiny model whose weights are large enough that a wrong mask shows."""
    torch.manual_seed(0)
    kind, options = FAMILIES[name]
    model = model_of(kind, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def row(name: str) -> list[str]:
    """Return a row: path, agreement with transformers in fp32 and in bf16, sampler, LoRA."""
    cpu, rollouts = torch.device("cpu"), ragged_rollouts(0, longest=40)
    try:
        model = family(name)
    except Exception as error:
        return [name, f"no such config here: {type(error).__name__} {str(error)[:60]!r}"]
    try:
        settings = TrainSettings(compute_dtype="float32", micro_batch_tokens=500)
        student = Student(deepcopy(model), settings, cpu)
        with native_attention(model), torch.no_grad():
            expected_N = single_logps(model, rollouts)
        off = float((student.logps(rollouts, 1.0) - expected_N).abs().max())
        found = [name, student.layout.attends, f"{off:.0e}", rounded(model, rollouts, expected_N)]
        found.append(LocalRollout(deepcopy(model), [END]).way)
    except Exception as error:
        return [name, f"{type(error).__name__}: {str(error)[:160]}"]
    try:
        adapted = Student(deepcopy(model), settings.model_copy(update={"lora": Lora(rank=2)}), cpu)
        names = {key for key, _ in adapted.weights()}
        found.append("yes" if names == set(model.state_dict()) else "names differ")
    except Exception as error:
        by_peft = "by peft (Mamba)" if "'out_proj' is incompatible" in str(error) else ""
        found.append(f"refused {by_peft or 'as ' + str(error).removeprefix('lora: ')[:60]}")
    return found


def rounded(model: PreTrainedModel, rollouts: list[Rollout], expected_N: torch.Tensor) -> str:
    """Return the mean difference of a bf16 student's log-probabilities, or "refused"."""
    settings = TrainSettings(compute_dtype="bfloat16", micro_batch_tokens=500)
    try:
        logps_N = Student(deepcopy(model), settings, torch.device("cpu")).logps(rollouts, 1.0)
    except UnusableModel:
        return "refused"
    return f"{float((logps_N - expected_N).abs().mean()):.0e}"


HEAD = ("configurations", "path", "nats off", "compute_dtype bfloat16", "sampling", "LoRA")


def size(cell: str) -> float:
    return float(cell) if cell[0].isdigit() else 0.0


def lines_of(rows: list[list[str]]) -> list[str]:
    """Return the lines of a table in which rows that differ in numbers alone are one, with the largest."""
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for each in rows:
        numbers = len(each) == len(HEAD) and each[3] != "refused"
        groups.setdefault((each[1], *each[4:]) if numbers else tuple(each), []).append(each)
    lines = [f"| {' | '.join(HEAD)} |", "|---|---|---:|---:|---|---|"]
    for alike in sorted(groups.values(), key=len, reverse=True):
        names = "; ".join(each[0] for each in alike)
        largest = (max(column, key=size) for column in list(zip(*alike, strict=True))[1:])
        lines.append(f"| {names} | {' | '.join(largest)} |")
    return lines


def main(page: Path | None) -> None:
    """Print a row for each family, and put the table behind the first table row of `page` if given."""
    logging.disable()
    warnings.simplefilter("ignore")
    rows = []
    with distributed.process_group():
        for name in sorted(FAMILIES):
            rows.append(row(name))
            print(*rows[-1], sep=" | ", flush=True)
    if page is not None:
        text = page.read_text()
        page.write_text("\n".join([text[: text.index("\n| configuration")], *lines_of(rows), ""]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
