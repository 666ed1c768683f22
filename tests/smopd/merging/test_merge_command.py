"""`smopd merge`: folders given by hand, and what it says to mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from smopd.__main__ import main
from smopd.merging.vectors import Part, TaskVectors
from tests.smopd.merging.test_vectors import loaded_with, lora, saved


def test_models_are_merged_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, one, two = saved(tmp_path)
    words = ["merge", one, two, "--base", base, "--output", str(tmp_path / "out")]
    assert main([*words, "--method", "ram", "--keep", "0.1", "1", "--scale", "0.5"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'out'}\n"
    expected = TaskVectors(base, [one, two]).merged([Part(0.5, 0.1), Part(0.5, 1.0)], "ram")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in expected)


def test_adapters_are_merged_by_hand_as_an_adapter_or_whole(tmp_path: Path) -> None:
    base = saved(tmp_path)[0]
    adapters = [lora(tmp_path / name, base, seed, 2, ["q_proj"]) for seed, name in enumerate(("a", "b"))]
    assert main(["merge", *adapters, "--output", str(tmp_path / "small")]) == 0
    assert main(["merge", *adapters, "--output", str(tmp_path / "large"), "--full", "--keep", "0.9"]) == 0
    small, large = loaded_with(base, tmp_path / "small"), load_file(tmp_path / "large" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    same = (small[name] - large[name]).abs() < 1e-6
    assert 0.7 < same.float().mean() < 1  # what was trimmed differs
    assert torch.equal(small["lm_head.weight"], large["lm_head.weight"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keep", "0.1", "1", "1"], "--keep: got 3 values, expected one, or one for each of 2 models"),
        (["--keep", "1.5"], "--keep: got 1.5, expected a share over 0 and at most 1"),
        (["--output", "."], "--output: . is there already, expected a new folder"),
        ([], "--base: not given, expected the model that the others were trained from"),
        (["--base", "/nowhere"], "/nowhere: no such folder, expected a saved model, or a hub id"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    output = [] if "--output" in words else ["--output", str(tmp_path / "out")]
    assert main(["merge", str(tmp_path), str(tmp_path), *output, *words]) == 2
    assert capsys.readouterr().err == f"smopd.merge: {said}\n"
