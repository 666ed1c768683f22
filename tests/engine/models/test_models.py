"""Loading models from a folder or hub id, their end tokens, and errors in one line."""

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedTokenizerBase

from smopd.engine.errors import UnusableModel
from smopd.engine.models.attention import rope_boundary
from smopd.engine.models.loading import (
    allow_custom_code,
    describe,
    load_model,
    load_tokenizer,
    logit_factor,
    require_usable,
    stored_dtype,
)
from smopd.engine.weights.architecture import architecture_of
from smopd.worlds.models import world_tokenizer
from tests.engine.tiny import END, VOCABULARY, tiny_model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return world_tokenizer(["a", "b"])


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    path = tmp_path / "model"
    tiny_model().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_saved_model_comes_back_and_keeps_its_weights_when_its_file_is_written_again(folder: Path) -> None:
    loaded, saved = load_model(folder, torch.float32), tiny_model().state_dict()
    narrow = load_model(str(folder), torch.bfloat16)
    assert {weight.dtype for weight in narrow.parameters()} == {torch.bfloat16}
    file = folder / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert not loaded.training and loaded.config._attn_implementation == "sdpa"
    assert all(torch.equal(weight, saved[name]) for name, weight in loaded.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stored_dtype_is_the_files(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_model().to(dtype).save_pretrained(tmp_path)
    assert stored_dtype(tmp_path) == dtype


def test_what_a_config_says_of_logits_and_of_rope_in_kinds_of_layers() -> None:
    for kind, factor in (("granite", 0.25), ("hyperclovax", 4.0)):
        assert logit_factor(SimpleNamespace(model_type=kind, logits_scaling=4.0)) == factor
    ropes = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    assert rope_boundary(SimpleNamespace(rope_parameters=ropes, max_position_embeddings=32)) == 32


LOADS = [lambda path: load_model(path, torch.float32), load_tokenizer, stored_dtype]


NO_FOLDER = "no such folder, expected one with config"
ABSENT = {"~/absent": NO_FOLDER, "runs/absent": NO_FOLDER}
ABSENT["smopd-tests/absent"] = "cannot be loaded, expected a folder with a saved model, or a hub id"


@pytest.mark.parametrize("path", ABSENT)
@pytest.mark.parametrize("load", LOADS)
def test_an_absent_folder_or_hub_id_is_named(path: str, load, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(FileNotFoundError, match=f"model {path}: {ABSENT[path]}") as error:
        load(path)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_model_or_a_tokenizer_is_named(tmp_path: Path) -> None:
    for load in (LOADS[0], stored_dtype):
        with pytest.raises(FileNotFoundError, match=r"has no config\.json, expected a saved model"):
            load(tmp_path)
    tiny_model().config.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"cannot be loaded.*no file named model.safetensors"):
        load_model(tmp_path, torch.float32)
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer, expected one of .*tokenizer\.json"):
        load_tokenizer(tmp_path)


MANY = '{"model_type": "qwen2", "num_hidden_layers": 1180591620717411303424}'


@pytest.mark.parametrize("config", ["{", '{"model_type": "none"}', "{}", '{"model_type": "clip"}', MANY])
def test_a_config_of_no_known_model_is_refused_in_a_line(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises((UnusableModel, FileNotFoundError), match=r"cannot be loaded|too many") as error:
        load_model(tmp_path, torch.float32)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_damaged_and_missing_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(
        UnusableModel, match=r"lack 1 of the weights .*: model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load_model(folder, torch.float32)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(UnusableModel, match="cannot be loaded"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("zipped", [False, True])
def test_pickled_weights_that_would_run_something_are_refused_and_run_nothing(zipped, folder, tmp_path):
    class Forged:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    (folder / "model.safetensors").unlink()
    torch.save(
        {"lm_head.weight": Forged()}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped
    )
    with pytest.raises(UnusableModel, match="its pickled weights hold more than weights"):
        load_model(folder, torch.float32)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("generation", "expected"), [(7, {7}), ([9, 7], {7, 9}), (None, set()), (0, {0})])
def test_every_end_token_counts(generation, expected, folder: Path, tokenizer) -> None:
    GenerationConfig(eos_token_id=generation).save_pretrained(folder)
    config, ends = describe(folder, tokenizer)
    assert ends == tuple(sorted({*expected, tokenizer.eos_token_id})) and config.vocab_size == VOCABULARY
    (folder / "generation_config.json").unlink()  # then the model's config says it
    assert describe(folder, tokenizer)[1] == tuple(sorted({END, tokenizer.eos_token_id}))


def test_a_head_of_its_own_survives_a_config_that_ties_it(tmp_path: Path) -> None:
    tiny_model(tied=True).save_pretrained(tmp_path / "base")
    file = tmp_path / "base/model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, file, {"format": "pt"})
    load_model(tmp_path / "base", torch.float32).save_pretrained(tmp_path / "export")
    for folder in ("base", "export"):
        loaded = load_model(tmp_path / folder, torch.float32)
        assert (
            loaded.lm_head.weight.equal(weights["lm_head.weight"]) and not loaded.config.tie_word_embeddings
        )
        assert loaded.model.embed_tokens.weight.equal(weights["model.embed_tokens.weight"])
    assert architecture_of(str(tmp_path / "export")).tied is None
    with pytest.raises(
        UnusableModel, match=r"ties lm_head.weight to model.embed_tokens.weight, which differ"
    ):
        architecture_of(str(tmp_path / "base"))  # vLLM goes by the config


@pytest.mark.parametrize(
    "generation", [{}, {"temperature": 0.9, "top_p": 0.6}, {"pad_token_id": -1}, {"early_stopping": True}]
)
def test_an_export_is_saved_whatever_the_generation_config(generation, folder, tmp_path, caplog) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], **generation}))
    loaded = load_model(folder, torch.float32)
    loaded.save_pretrained(tmp_path / "export")
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == [1, 7]
    assert ("exports keep only the token ids" in caplog.text) == bool(generation)


def test_a_tokenizer_that_does_not_fit_or_cannot_be_saved_is_found_before(
    folder, tokenizer, monkeypatch
) -> None:
    def refuse(*_, **__):
        raise ValueError("no such vocabulary")

    require_usable(folder, tokenizer)
    larger = load_tokenizer(folder)
    larger.add_tokens([f"<{i}>" for i in range(VOCABULARY)])
    with pytest.raises(UnusableModel, match=rf"embeds {VOCABULARY} tokens, its tokenizer has '<\d+>' at \d+"):
        require_usable(folder, larger)
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", refuse)
    with pytest.raises(UnusableModel, match=r"its tokenizer cannot be saved.*no such vocabulary"):
        require_usable(folder, tokenizer)


def test_a_model_without_an_end_token_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, {}]}')
    with pytest.raises(UnusableModel, match=r"eos_token_id \{\}, not a token"):
        describe(folder, load_tokenizer(folder))
    GenerationConfig().save_pretrained(folder)
    without = load_tokenizer(folder)
    without.eos_token = None
    with pytest.raises(UnusableModel, match="neither its generation config nor its tokenizer has an eos"):
        describe(folder, without)


OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig

Path(__file__).with_name("ran").touch()

class OwnConfig(LlamaConfig):
    model_type = "own"
"""


def test_code_that_comes_with_a_model_runs_only_where_it_is_allowed(
    folder, tokenizer, monkeypatch, tmp_path
) -> None:
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    (folder / "own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    with pytest.raises(UnusableModel, match=r"runs only with model\.trust_remote_code"):
        describe(folder, tokenizer)
    assert not [*modules.rglob("ran")]
    allow_custom_code(True)
    try:
        assert describe(folder, tokenizer)[0].model_type == "own" and [*modules.rglob("ran")]
    finally:
        allow_custom_code(False)
