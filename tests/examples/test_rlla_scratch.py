"""examples/rlla_scratch.yaml with real prompts and vocabulary, one step per run."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.rlla_scratch import QWEN_VOCAB_SIZE, qwen_tokenizer, qwen_vocab_model
from tests.smopd.recipes import ROOT, metric_lines, train_here


@pytest.mark.slow
def test_every_part_of_the_path_takes_real_items(tmp_path, data_set):
    assert data_set("rlla/sft") and data_set("rlla/test") and data_set("tokenizer/qwen")
    done = train_here(
        str(ROOT / "examples/rlla_scratch.yaml"),
        *("--output", str(tmp_path / "out")),
        *("--warm_start.steps", "1"),
        *("--warm_start.batch_size", "2"),
        *("--loop.steps", "1"),
        *("--loop.prompts_per_step", "1"),
        *("--rollout.max_new_tokens", "8"),
        *("--data.evaluation", "null"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "399 training prompts of 399 rows (0 too long" in done.stdout
    for run in ("accuracy_teacher", "format_teacher", "student"):
        (line,) = metric_lines(tmp_path / "out" / run)
        assert all(value is not None and math.isfinite(value) for value in line.values()), line
        with safe_open(tmp_path / "out" / run / "export/model.safetensors", "pt") as weights:
            assert weights.get_slice("lm_head.weight").get_shape()[0] == 151_936
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/student/export")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 151_645


QWEN_TEXTS = (
    "Hello, world! 1234 it's",
    "  leading and trailing  \n\n\ttabs\r\n",
    "Grüße, 世界, مرحبا, 👩‍🚀",
    '<think> a </think>\n<tool_call>\n{"name": "f", "parameters": {"x": [1, -2.5e3, null]}}\n</tool_call>',
)


def test_qwen_vocab_model_has_qwens_ids_and_template_and_loads_again(data_set, tmp_path):
    sizes = {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 1}
    model, tokenizer = qwen_vocab_model(0, data_set("tokenizer/qwen"), **sizes)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    model_again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model_again.lm_head.weight.shape == (QWEN_VOCAB_SIZE, 64)
    assert model_again.model.layers[0].self_attn.k_proj.weight.shape == (32, 64)
    assert torch.equal(model_again.lm_head.weight, model.lm_head.weight)
    assert model_again.config.eos_token_id == 151645 and model_again.config.max_position_embeddings == 4096
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 151_646
    for each in (tokenizer, again):
        assert (each.eos_token_id, each.pad_token_id) == (151645, 151643)
        assert each("Hello world 12")["input_ids"] == [9707, 1879, 220, 16, 17]
    for text in QWEN_TEXTS:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
        chat = [{"role": "user", "content": text}]
        encoded = [
            each.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            for each in (tokenizer, again)
        ]
        assert encoded[0] == encoded[1]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"


def test_ranks_file_must_exist_and_be_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer_file .*: no such file"):
        qwen_tokenizer(tmp_path / "absent.tiktoken")
    (tmp_path / "broken.tiktoken").write_text("IQ== 0\nnot a rank line\n")
    with pytest.raises(
        ValueError, match=r"broken.tiktoken: .*, expected a base64 token and its rank on each line"
    ):
        qwen_tokenizer(tmp_path / "broken.tiktoken")
