"""The recipe on real RLLA prompts at the real vocabulary, cut to one step a run."""

from __future__ import annotations

import json
import math

from safetensors import safe_open
from transformers import AutoTokenizer

from tests.smopd.recipes import metric_lines, train


def test_every_part_of_the_path_takes_real_items(tmp_path, shared_data):
    items = {
        "path": str(shared_data / "rlla/rlla_sft.jsonl.gz"),
        "exclude": str(shared_data / "rlla/rlla_4k_test.parquet"),
    }
    done = train(
        "rlla_scratch",
        *("--output", str(tmp_path / "out")),
        *("--model.kwargs", json.dumps({"tokenizer_file": str(shared_data / "tokenizer/qwen.tiktoken")})),
        *("--data.train.kwargs", json.dumps(items)),
        *("--warm_start.source.kwargs", json.dumps(items)),
        *("--data.evaluation.source", items["exclude"]),
        *("--data.evaluation.limit", "3"),
        *("--warm_start.steps", "1"),
        *("--warm_start.batch_size", "2"),
        *("--loop.steps", "1"),
        *("--loop.prompts_per_step", "1"),
        *("--rollout.max_new_tokens", "8"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "399 training prompts of 399 rows (0 too long" in done.stdout
    for run in ("accuracy_teacher", "format_teacher", "student"):
        (line,) = metric_lines(tmp_path / "out" / run)
        assert all(value is not None and math.isfinite(value) for value in line.values()), line
        assert list((tmp_path / "out" / run / "checkpoints").glob("step_*/manifest.json"))
        with safe_open(tmp_path / "out" / run / "export/model.safetensors", "pt") as weights:
            assert weights.get_slice("lm_head.weight").get_shape()[0] == 151_936
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/student/export")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 151_645
