"""Where data is looked for, short names, and the sample that stands in for RLLA."""

from __future__ import annotations

import json
from pathlib import Path

import platformdirs
import pytest

from bench.study import snips
from smopd.data import sample
from smopd.data.catalogue import short_names
from smopd.data.places import data_folder, here, located
from smopd.data.sources import load_rows
from smopd.evals.rlla import evaluation_rows, load_rlla_items, training_rows
from smopd.rewards.rlla import format_reward
from smopd.worlds.models import ENDOFTEXT, IM_END, sample_tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of data."""
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    return tmp_path


def test_the_folder_is_the_variable_s_or_the_user_s_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOPD_DATA", "~/somewhere")
    assert data_folder() == Path.home() / "somewhere"
    for unset in ("", None):
        monkeypatch.setenv("SMOPD_DATA", "")
        if unset is None:
            monkeypatch.delenv("SMOPD_DATA")
        assert data_folder() == platformdirs.user_cache_path("smopd")


def test_a_short_name_is_a_path_in_the_folder(folder: Path) -> None:
    (folder / "rlla").mkdir()
    (folder / "rlla/rlla_4k_test.parquet").write_bytes(b"")
    assert located("rlla/test") == folder / "rlla/rlla_4k_test.parquet"
    assert located("rlla") == folder / "rlla" and here("rlla") and not here("bfcl")
    assert located("./rlla") == Path("rlla") and located(Path("/a/b.json")) == Path("/a/b.json")
    with pytest.raises(FileNotFoundError) as raised:
        located("safe/alpaca_train")
    assert str(raised.value) == (
        f"safe/alpaca_train is absent: no {folder}/safe/alpaca_prompt_only_train.jsonl.gz; "
        f"`python -m smopd.data fetch safe` fetches it, or SMOPD_DATA ({folder}) names another folder"
    )


def test_a_source_may_be_a_short_name_which_comes_before_a_hub_id(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^rlla/test is absent: no .*fetch rlla"):
        load_rows("rlla/test")
    with pytest.raises(ValueError, match="is a file, which takes no split"):
        load_rows("rlla/test", split="train")
    (folder / "safe").mkdir()
    (folder / "safe/alpaca_prompt_only_test.jsonl.gz").write_bytes(b"")
    assert load_rows("safe/alpaca_test") == []


def test_a_file_that_is_absent_in_a_folder_of_data_says_how_it_is_fetched(folder: Path) -> None:
    (folder / "snips").mkdir()
    with pytest.raises(FileNotFoundError, match=r"^snips: no file .*Playlist_full.json; `.* fetch snips`"):
        snips.prompts("snips", 1, 0, "train")
    with pytest.raises(FileNotFoundError, match=r"AddToPlaylist_full.json$"):
        snips.prompts(str(folder.parent / "other"), 1, 0, "train")


def test_the_sample_is_small_and_its_halves_are_disjoint() -> None:
    files = list(sample.FOLDER.iterdir())
    assert sum(path.stat().st_size for path in files) < 120_000 and sample.FOLDER / "NOTICE" in files
    train = training_rows("rlla/sft", "rlla/test", sample=True)
    held_out = evaluation_rows("rlla/test", sample=True)
    assert (len(train), len(held_out)) == (16, 8)
    assert not {json.dumps(row["prompt"]) for row in train} & {json.dumps(row["prompt"]) for row in held_out}
    truths = [row["ground_truth"] for row in (*train, *held_out)]
    assert format_reward([None] * 24, truths, ground_truth=truths) == [1.0] * 24
    assert {"<tool_call>" in truth for truth in truths} == {True, False}


@pytest.mark.parametrize("name", ["rlla/sft", "rlla/test"])
def test_the_sample_is_of_the_data_set(data_set, name: str) -> None:
    items = {item.index: item for item in load_rlla_items(data_set(name))}
    path = sample.path_of(name, sample=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, item in zip(rows, load_rlla_items(path), strict=True):
        real = items[row["row"]]
        assert (item.messages, item.ground_truth) == (real.messages, real.ground_truth)


def test_the_sample_s_tokenizer_is_qwen_s_in_small() -> None:
    tokenizer, again = sample_tokenizer(), sample_tokenizer()
    assert tokenizer.get_vocab() == again.get_vocab()
    assert (tokenizer.eos_token, tokenizer.pad_token) == (IM_END, ENDOFTEXT)
    text = 'zwölf <tool_call>\n{"a": 日本}\n  end'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    rows = training_rows("rlla/sft", sample=True) + evaluation_rows("rlla/test", sample=True)
    chats = [row["prompt"] for row in rows]
    ids = tokenizer.apply_chat_template(chats, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert max(map(len, ids)) < 2200 and ids[0][0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_or_sample_is_decided_by_what_is_here(folder: Path) -> None:
    values = {"a": [{"x": 1, "or_sample": ["rlla/sft", "rlla/test"]}], "b": {"sample": "mine"}}
    decided = sample.decided(values)
    assert decided == {"a": [{"x": 1, "sample": True}], "b": {"sample": "mine"}}
    assert sample.is_used(decided) and not sample.is_used(values)
    (folder / "rlla").mkdir()
    (folder / "rlla/rlla_sft.jsonl.gz").write_bytes(b"")
    assert sample.decided(values)["a"] == [{"x": 1, "sample": False}]
    for wrong in (["rlla/tset"], [3]):
        with pytest.raises(ValueError, match=r"or_sample: .* is no short name of data"):
            sample.decided({"or_sample": wrong})


def test_the_sample_stands_in_for_short_names_alone(folder: Path) -> None:
    path = folder / "mine.jsonl"
    row = {"prompt": [{"role": "user", "content": "u"}], "reward_model": {"ground_truth": "t"}}
    path.write_text(json.dumps(row) + "\n")
    (found,) = training_rows(str(path), sample=True)
    assert found["ground_truth"] == "t"
    assert set(sample.FILES) <= set(short_names())
