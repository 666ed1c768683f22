"""`smopd merge` against a naive float64 merge, over files, dtypes, ties and adapters; refusals."""

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

from smopd.merge import main as merge
from smopd.merging.vectors import Part, TaskVectors, trimmed
from smopd.worlds.models import world_tokenizer
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


def saved(folder: Path, *, tied: bool = False, dtype: torch.dtype | None = None, **options: Any) -> list[str]:
    """A base and two models trained from it, in folders."""
    base = tiny_model(0, tied=tied, layers=1)
    paths = []
    for i, model in enumerate([base, trained(base, 1), trained(base, 2, share=1.0)]):
        path = folder / f"model{i}"
        model.to(dtype or torch.float32).save_pretrained(path, **options)
        paths.append(str(path))
    return paths


def naive(base: Tensor, models: Sequence[Tensor], parts: Sequence[Part]) -> Tensor:
    """One tensor's merge in float64."""
    total = base.double().flatten()
    for model, part in zip(models, parts, strict=True):
        change = (model.double() - base.double()).flatten()
        largest = change.abs().argsort(descending=True)[: round(part.keep * len(change))]
        total[largest] += change[largest] * part.scale
    return total.view_as(base)


def test_the_share_that_is_kept_is_exact_where_changes_are_equal() -> None:
    change = torch.tensor([[0.0, -1.0, 1.0], [2.0, 1.0, -1.0]])
    assert [int(trimmed(change, keep).count_nonzero()) for keep in (0.5, 1 / 6, 0.01, 1.0)] == [3, 1, 0, 5]


@pytest.mark.parametrize("parts", PARTS, ids=["plain", "trimmed", "scaled", "one", "left out"])
def test_a_merge_is_the_naive_sum(tmp_path: Path, parts: list[Part]) -> None:
    # In bf16 equal changes could be trimmed either way.
    dtype = torch.bfloat16 if parts == PARTS[0] else torch.float32
    paths = saved(tmp_path, dtype=dtype)
    base, *models = [load_file(f"{path}/model.safetensors") for path in paths]
    words = [*paths[1:], "--base", paths[0], "--output", str(tmp_path / "out")]
    for name in ("scale", "keep", "exclude"):
        words += [f"--{name}", *(str(getattr(part, name)) for part in parts)]
    assert merge(words) == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == base.keys()
    rtol = 2**-8 if dtype == torch.bfloat16 else 0  # half a unit: it is computed in fp32
    for name, value in merged.items():
        left_out = parts == PARTS[4] and ("self_attn" in name or "norm" in name)
        taken = [base[name] if left_out else models[0][name], models[1][name]]
        expected = naive(base[name], taken, parts)
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), expected, rtol=rtol, atol=1e-6)
    if parts == PARTS[3]:
        assert all(torch.equal(value, models[0][name]) for name, value in merged.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype


def test_sharded_and_tied_models_give_the_same_merge(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", tied=True)
    sharded = saved(tmp_path / "sharded", tied=True, max_shard_size="50KB")
    assert (Path(sharded[0]) / "model.safetensors.index.json").exists()
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


def test_a_tied_head_goes_to_an_engine_under_both_names_and_may_be_stored_twice(tmp_path: Path) -> None:
    paths = saved(tmp_path, tied=True)
    vectors = TaskVectors(paths[0], paths[1:])
    weights = dict(vectors.with_tied(vectors.merged([Part(), Part()])))
    assert weights.keys() == tiny_model(0, tied=True, layers=1).state_dict().keys()
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    file = Path(paths[1]) / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    TaskVectors(paths[0], paths[1:])
    merged = dict(TaskVectors(paths[1], paths[2:]).merged([Part(scale=0.5)]))
    assert merged["lm_head.weight"].equal(merged["model.embed_tokens.weight"]), "stored twice in the base"
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"model1: lm_head.weight differs from model.embed_tokens.weight"):
        TaskVectors(paths[0], paths[1:])


def test_a_merge_has_what_describes_its_base_and_may_be_written_and_read(tmp_path: Path) -> None:
    """No other form of the base's weights, whose folder is read-only."""
    base, *models = map(Path, saved(tmp_path))
    other = "model.gguf onnx/model.onnx original/params.json README.md .git/HEAD tf_model.h5"
    for name in (*other.split(), "code/own.py"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).touch()
    for folder in (base / "code", base):
        folder.chmod(0o555)
    assert merge([*map(str, models), "--base", str(base), "--output", str(tmp_path / "out")]) == 0
    found = {str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*")}
    described = "model.safetensors config.json generation_config.json code code/own.py"
    assert found.keys() == {*described.split(), "manifest.json", "manifest.sha256"}
    assert found["model.safetensors"].stat().st_mode & 0o777 == 0o644
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "out", *found.values()))


def lora(folder: Path, base: str, seed: int, rank: int, targets: list[str], **config: Any) -> str:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    made = LoraConfig(r=rank, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM", **config)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), made)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def test_adapters_merge_to_full_weights(tmp_path: Path) -> None:
    """As peft merges each."""
    from peft import PeftModel

    base = saved(tmp_path)[0]
    one = lora(tmp_path / "one", base, 1, 2, ["q_proj", "down_proj"])
    two = lora(tmp_path / "two", base, 2, 3, ["q_proj", "v_proj"], use_rslora=True)
    assert merge([one, two, "--scale", "1", "0.5", "--output", str(tmp_path / "full")]) == 0

    alone, found = load_file(f"{base}/model.safetensors"), load_file(tmp_path / "full" / "model.safetensors")
    plain = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    models = map(PeftModel.from_pretrained, plain, (one, two))
    first, second = (model.merge_and_unload().state_dict() for model in models)
    for name, value in alone.items():
        expected = value.double() + (first[name].double() - value) + 0.5 * (second[name].double() - value)
        torch.testing.assert_close(found[name].double(), expected, rtol=0, atol=2e-6, msg=name)
    assert any(not torch.equal(found[name], value) for name, value in alone.items())


def mistake(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the error of the command."""
    with pytest.raises(SystemExit, match="2"):
        merge([str(word) for word in words])
    return capsys.readouterr().err


def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path: Path, capsys) -> None:
    base, other, _ = saved(tmp_path)
    plain = lora(tmp_path / "plain", base, 1, 2, ["q_proj"])
    foreign = lora(tmp_path / "foreign", other, 1, 2, ["q_proj"])
    dora = lora(tmp_path / "dora", base, 1, 2, ["q_proj"], use_dora=True)
    output = ("--output", tmp_path / "out")
    for start in ("pissa_niter_4", "olora"):
        changed = lora(tmp_path / start, base, 1, 2, ["q_proj"], init_lora_weights=start)
        assert f"{start}: init_lora_weights is '{start}', which changes" in mistake(capsys, changed, *output)
    said = r"foreign: is an adapter of .*model1, expected one of .*model0"
    assert re.search(said, mistake(capsys, plain, foreign, *output))
    assert "dora: use_dora is True, expected none: only plain LoRA merges" in mistake(capsys, dora, *output)
    assert "--exclude: 'mpl' matches no tensor of" in mistake(capsys, plain, "--exclude", "mpl", *output)
    assert "MODEL: none given" in mistake(capsys, "--base", base, *output)
    assert merge([plain, "--output", str(tmp_path / "whole")]) == 0
    (tmp_path / "whole" / "config.json").write_text("{}")
    assert "config.json" in mistake(capsys, tmp_path / "whole", "--base", base, *output)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--keep 0.1 1 1 --output new", "--keep: got 3 values, expected 1 or 2"),
        ("--scale nan --output new", "--scale: got [nan], expected numbers of at most 1e9"),
        ("--keep 1.5 --output new", "--keep: got 1.5, expected a share in (0, 1]"),
        ("--exclude [ --output new", "--exclude: got '[', expected a regular expression (untermin"),
        ("--output .", "--output: . exists, expected a new folder"),
        ("--output new", "--base: not given, expected the model that the others were trained from"),
    ],
)
def test_mistakes_of_the_command_are_one_line(tmp_path: Path, capsys, words: str, said: str) -> None:
    error = mistake(capsys, tmp_path, tmp_path, *words.split())
    assert error.startswith(f"smopd.merge: {said}") and error.count("\n") == 1


def test_models_of_other_tensors_are_named(tmp_path: Path) -> None:
    paths = saved(tmp_path)
    file = Path(paths[2]) / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight")
    name = "model.norm.weight"
    for said, changed in (
        (f"lacks the tensor {name}, which the base", {}),
        ("has the tensor extra, which the base", {name: norm, "extra": norm + 1}),
        (f"{name} has shape (65,), the base", {name: torch.ones(65)}),
    ):
        save_file(tensors | changed, file)
        with pytest.raises(ValueError, match=re.escape(f"model2: {said}")):
            TaskVectors(paths[0], paths[1:])
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"model2: cannot be read \("):
        TaskVectors(paths[0], paths[1:])


def test_a_model_of_another_base_is_named(tmp_path: Path, caplog, capsys) -> None:
    base, one, _ = saved(tmp_path)
    file, config = Path(one) / "model.safetensors", Path(one) / "config.json"
    stored = load_file(f"{base}/model.safetensors")
    for change, said in ((0.5, ""), (-1.5, "is this the model's base?")):
        save_file({name: value * (1 + change) for name, value in stored.items()}, file)
        TaskVectors(base, [one])
        assert said in caplog.text and bool(said) == bool(caplog.text)
    text = config.read_text()
    for entry, value in (("hidden_act", '"relu"'), ("rope_theta", 7.0), ("num_attention_heads", 4)):
        config.write_text(re.sub(rf'("{entry}": )[^,\n]+', rf"\g<1>{value}", text))
        with pytest.raises(ValueError, match=rf"model1: in its config, .*{entry}.*{base}"):
            TaskVectors(base, [one])
    config.write_text(text)
    for path, words in ((base, ["yes", "no"]), (one, ["no", "yes"])):
        world_tokenizer(words).save_pretrained(path)
    assert merge([one, "--base", base, "--output", str(tmp_path / "out")]) == 0
    assert "warning: " in (err := capsys.readouterr().err) and "model1 has another tokenizer" in err
