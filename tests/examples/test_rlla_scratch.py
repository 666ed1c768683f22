"""examples/rlla_scratch.yaml with real prompts and vocabulary, one step per run."""

import math

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from tests.smopd.recipes import ROOT, metric_lines, train_here

SMALL = """
    --warm_start.steps 1 --warm_start.batch_size 2 --loop.steps 1 --loop.prompts_per_step 1
    --rollout.max_new_tokens 8 --data.evaluation null --only accuracy_teacher student
    --model.kwargs.hidden_size 32 --model.kwargs.layers 1 --model.kwargs.heads 1 --model.kwargs.kv_heads 1
"""


@pytest.mark.slow
def test_every_part_of_the_path_takes_real_items(tmp_path, data_set):
    assert data_set("rlla/sft") and data_set("rlla/test") and data_set("tokenizer/qwen")
    own = ("--output", "out", "--teachers.models", "[{model: accuracy_teacher, reward: accuracy}]")
    done = train_here(str(ROOT / "examples/rlla_scratch.yaml"), *SMALL.split(), *own, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "399 training prompts of 399 rows (0 too long" in done.stdout
    for run in ("accuracy_teacher", "student"):
        (line,) = metric_lines(tmp_path / "out" / run)
        assert all(value is not None and math.isfinite(value) for value in line.values()), line
        with safe_open(tmp_path / "out" / run / "export/model.safetensors", "pt") as weights:
            assert weights.get_slice("lm_head.weight").get_shape()[0] == 151_936
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/student/export")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 151_645
