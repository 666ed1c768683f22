"""Merged weights against a naive float64 merge, over files, dtypes, ties and adapters; memory; refusals."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from smopd.engine.weights import transport
from smopd.merging.vectors import Method, Part, TaskVectors, merge_adapters, trimmed
from tests.engine.tiny import tiny_model

PARTS = [
    [Part(), Part()],
    [Part(keep=0.1), Part()],
    [Part(scale=0.5, keep=0.3), Part(scale=-1.5, keep=0.02)],
    [Part(), Part(scale=0.0)],
    [Part(exclude="self_attn|norm"), Part(keep=0.5)],
]


def trained(base: PreTrainedModel, seed: int, share: float = 0.3) -> PreTrainedModel:
    """The base with a share of its entries changed."""
    model = type(base)(base.config)
    model.load_state_dict(base.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            step = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.add_(step * (torch.rand(parameter.shape, generator=generator) < share))
    return model


def saved(
    folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, **options: Any
) -> list[str]:
    """A base and two models trained from it, in folders."""
    base = tiny_model(0, tied=tied, layers=1)
    paths = []
    for i, model in enumerate([base, trained(base, 1), trained(base, 2, share=1.0)]):
        path = folder / f"model{i}"
        model.to(dtype).save_pretrained(path, **options)
        paths.append(str(path))
    return paths


def naive(base: Tensor, models: Sequence[Tensor], parts: Sequence[Part], method: Method) -> Tensor:
    """One tensor's merge in float64, entry by entry."""
    vectors = []
    for model, part in zip(models, parts, strict=True):
        change = (model.double() - base.double()).flatten()
        order = sorted(range(len(change)), key=lambda i: (-abs(change[i].item()), i))
        kept = torch.zeros_like(change)
        for i in order[: round(part.keep * len(change))]:
            kept[i] = change[i] * part.scale
        vectors.append(kept)
    out = []
    for entries in zip(*(vector.tolist() for vector in vectors), strict=True):
        if method == "sum":
            out.append(sum(entries))
            continue
        if method == "ties":
            total = sum(entries)
            entries = [entry for entry in entries if entry * total > 0]
        changed = [entry for entry in entries if entry != 0]
        out.append(sum(changed) / len(changed) if changed else 0.0)
    return base.double() + torch.tensor(out, dtype=torch.float64).view_as(base)


@pytest.mark.parametrize("parts", PARTS, ids=["plain", "trimmed", "scaled", "one", "left out"])
@pytest.mark.parametrize("method", ["sum", "ties", "ram"])
def test_each_method_is_the_naive_merge(tmp_path: Path, method: Method, parts: list[Part]) -> None:
    paths = saved(tmp_path)
    base, *models = [load_file(f"{path}/model.safetensors") for path in paths]
    merged = dict(TaskVectors(paths[0], paths[1:]).merged(parts, method))
    assert merged.keys() == base.keys()
    for name, value in merged.items():
        left_out = parts == PARTS[4] and ("self_attn" in name or "norm" in name)
        taken = [base[name] if left_out else models[0][name], models[1][name]]
        torch.testing.assert_close(value.double(), naive(base[name], taken, parts, method), rtol=0, atol=1e-6)
    if parts == PARTS[3]:
        assert all(torch.equal(value, models[0][name]) for name, value in merged.items())


def test_bf16_is_computed_in_fp32_and_written_in_bf16(tmp_path: Path) -> None:
    paths = saved(tmp_path, dtype=torch.bfloat16)
    TaskVectors(paths[0], paths[1:]).write(tmp_path / "out", [Part(keep=0.5), Part(scale=0.7)])
    base, *models = [load_file(f"{path}/model.safetensors") for path in paths]
    out = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in out.items():
        expected = naive(
            base[name], [model[name] for model in models], [Part(keep=0.5), Part(scale=0.7)], "sum"
        )
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.double(), expected, rtol=2**-8, atol=1e-7)  # half a unit, and fp32's
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_sharded_and_tied_models_give_the_same_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = saved(tmp_path / "whole", tied=True)
    sharded = saved(tmp_path / "sharded", tied=True, max_shard_size="50KB")
    assert (Path(sharded[0]) / "model.safetensors.index.json").exists()
    monkeypatch.setattr(transport, "PART_BYTES", 30_000)
    parts = [Part(keep=0.2), Part()]
    TaskVectors(whole[0], whole[1:]).write(tmp_path / "one", parts)
    TaskVectors(sharded[0], [sharded[1], whole[2]]).write(tmp_path / "many", parts)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 1
    one, many = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "many"))
    assert one.lm_head.weight is one.model.embed_tokens.weight
    for (name, a), b in zip(one.state_dict().items(), many.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    listed = json.loads((tmp_path / "many" / "manifest.json").read_text())["files"]
    there = {file.name for file in (tmp_path / "many").iterdir()} - {"manifest.json", "manifest.sha256"}
    assert listed.keys() == there


def test_a_tied_head_goes_to_an_engine_under_both_names(tmp_path: Path) -> None:
    paths = saved(tmp_path, tied=True)
    vectors = TaskVectors(paths[0], paths[1:])
    weights = dict(vectors.with_tied(vectors.merged([Part(), Part()])))
    assert weights.keys() == tiny_model(0, tied=True, layers=1).state_dict().keys()
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]


def test_a_model_that_stores_the_tied_head_too_is_read(tmp_path: Path) -> None:
    paths = saved(tmp_path, tied=True)
    file = Path(paths[1]) / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    TaskVectors(paths[0], paths[1:])
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"model1: lm_head.weight is not model.embed_tokens.weight"):
        TaskVectors(paths[0], paths[1:])


def test_no_second_copy_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Base and two models of 64 MiB each: the peak is less than one of them, parts of 4 MiB among it."""
    base = tiny_model(0)
    for i in range(3):
        base.save_pretrained(tmp_path / f"m{i}")
        tensors = load_file(tmp_path / f"m{i}" / "model.safetensors")
        tensors |= {f"model.layers.{n}.extra": torch.randn(2**18) for n in range(64)}
        save_file(tensors, tmp_path / f"m{i}" / "model.safetensors")
        del tensors
    monkeypatch.setattr(transport, "PART_BYTES", 4 << 20)
    vectors = TaskVectors(str(tmp_path / "m0"), [str(tmp_path / "m1"), str(tmp_path / "m2")])
    parts = [Part(keep=0.1), Part()]

    def memory(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) // 1024 if found else 0

    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is no room to hide in
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = memory("VmRSS")
    vectors.write(tmp_path / "out", parts)
    assert memory("VmHWM") - before < 48  # 32 measured; 129 where the merge is a list first
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def lora(folder: Path, base: str, seed: int, rank: int, targets: list[str], **config: Any) -> str:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=rank, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM", **config),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def loaded_with(base: str, adapter: Path | str) -> dict[str, Tensor]:
    """The base's weights with an adapter merged by peft."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    return model.merge_and_unload().state_dict()


def test_adapters_merge_as_an_adapter_and_as_full_weights(tmp_path: Path) -> None:
    base = saved(tmp_path)[0]
    one = lora(tmp_path / "one", base, 1, 2, ["q_proj", "down_proj"])
    two = lora(tmp_path / "two", base, 2, 3, ["q_proj", "v_proj"], use_rslora=True)
    parts = [Part(), Part(scale=0.5)]
    merge_adapters([one, two], parts, "sum", tmp_path / "adapter")
    TaskVectors(base, [one, two]).write(tmp_path / "full", parts)

    alone = load_file(f"{base}/model.safetensors")
    first, second = loaded_with(base, one), loaded_with(base, two)
    as_adapter = loaded_with(base, tmp_path / "adapter")
    as_full = load_file(tmp_path / "full" / "model.safetensors")
    for name, value in alone.items():
        expected = value.double() + (first[name].double() - value) + 0.5 * (second[name].double() - value)
        for found in (as_adapter, as_full):
            torch.testing.assert_close(found[name].double(), expected, rtol=0, atol=2e-6, msg=name)
    assert any(not torch.equal(as_full[name], value) for name, value in alone.items())


def test_the_share_that_is_kept_is_exact_where_changes_are_equal() -> None:
    change = torch.tensor([[0.0, -1.0, 1.0], [2.0, 1.0, -1.0]])
    for keep, n in ((0.5, 3), (1 / 6, 1), (0.01, 0), (1.0, 5)):
        kept = trimmed(change, keep)
        assert kept.count_nonzero() == n and torch.equal(kept[kept != 0], change[kept != 0])
        assert n == 0 or kept[1, 0] == 2


def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    base, other, _ = saved(tmp_path)
    plain = lora(tmp_path / "plain", base, 1, 2, ["q_proj"])
    with pytest.raises(ValueError, match=r"plain: is an adapter of .*model0, expected one of the base"):
        TaskVectors(other, [plain])
    foreign = lora(tmp_path / "foreign", other, 1, 2, ["q_proj"])
    with pytest.raises(ValueError, match=r"foreign: is an adapter of .*model1, .*plain is one of .*model0"):
        merge_adapters([plain, foreign], [Part(), Part()], "sum", tmp_path / "out")
    with pytest.raises(ValueError, match=r"keep 0.5: what is trimmed"):
        merge_adapters([plain, plain], [Part(), Part(keep=0.5)], "sum", tmp_path / "out")
    dora = lora(tmp_path / "dora", base, 1, 2, ["q_proj"], use_dora=True)
    with pytest.raises(ValueError, match=r"dora: use_dora is True, expected none: only plain LoRA is merged"):
        TaskVectors(base, [dora])


def test_models_of_other_tensors_are_named(tmp_path: Path) -> None:
    paths = saved(tmp_path)
    file = Path(paths[2]) / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight")
    cases = {
        "model2: lacks the tensor model.norm.weight, which the base": tensors,
        "model2: has the tensor extra, which the base": {
            **tensors,
            "model.norm.weight": norm,
            "extra": norm + 1,
        },
        "model2: model.norm.weight has shape (65,), the base": {
            **tensors,
            "model.norm.weight": torch.ones(65),
        },
    }
    for said, changed in cases.items():
        save_file(changed, file)
        with pytest.raises(ValueError, match=re.escape(said)):
            TaskVectors(paths[0], paths[1:])
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"model2: cannot be read \("):
        TaskVectors(paths[0], paths[1:])
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"model2: has no model.safetensors and no model.safeten"):
        TaskVectors(paths[0], paths[1:])
