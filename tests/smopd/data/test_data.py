"""Prompt sources: every form, what is counted, and what each mistake in the data answers."""

import gzip
import multiprocessing
import os
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet
from tokenizers.processors import TemplateProcessing

from smopd.config.settings import Settings
from smopd.data import prompts as prompts_module
from smopd.data import sources
from smopd.data.chat import render
from smopd.data.prompts import Encoder, _plain, batch_indices, load_demonstrations, load_prompts
from smopd.data.sources import load_rows, open_rows
from smopd.engine.errors import UserCodeError
from smopd.engine.files import DamagedFile
from smopd.run.failures import UnusableInput
from smopd.run.inputs import read_inputs
from smopd.worlds.models import world_tokenizer
from smopd.worlds.toy_world import demonstrations, vocabulary
from tests.smopd.recipes import write_lines
from tests.smopd.run.invariance_worker import SETTINGS

ROWS = [{"prompt": "call anna please", "label": 1}, {"prompt": "play imagine at 3", "label": None}]
CHAT = [{"role": "system", "content": "play"}, {"role": "user", "content": "call anna"}]
HERE, WORLD = __name__, "smopd.worlds.toy_world"


def some_rows(n=3, split="train"):
    os.chdir("/")  # which leaves the run where it is
    return [{"prompt": f"call {split} {i}", "i": i} for i in range(n)]


def no_rows():
    return []


def numbered(row=None):
    return {**row, 3: "three"} if row else 3


REUSED = {"prompt": "", "tags": []}


def reused(row):
    REUSED["prompt"] = row["prompt"]
    REUSED["tags"].append(row["i"])
    return REUSED


def with_array(i=0, n=2000):
    values = np.zeros(n)
    values[i] = 1
    return [{"prompt": "call anna", "values": values, "tags": {"one", "two", "three"}}]


def breaks_off():
    yield {"prompt": "call anna"}
    raise KeyError("second")


def odd_ones(row):
    return {**row, "mapped": True} if row["i"] % 2 else None


@pytest.fixture(scope="module")
def tokenizer():
    return world_tokenizer(vocabulary())


@pytest.fixture
def write(tmp_path):
    def write_file(rows, name="rows.jsonl"):
        path = write_lines(tmp_path / name, rows)
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
        elif name.endswith(("parquet", "csv")):
            save = parquet.write_table if name.endswith("parquet") else csv.write_csv
            save(pyarrow.Table.from_pylist(rows), path)
        return str(path)

    return write_file


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.parquet", "a.csv"])
def test_files_of_every_form_give_the_same_rows(write, tmp_path, monkeypatch, name):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert load_rows(write(ROWS, name)) == ROWS
    write(ROWS[:1], f"b{name[1:]}")
    assert load_rows(str(tmp_path / f"?{name[1:]}")) == [*ROWS, ROWS[0]]
    write(ROWS[:1], f"c1{name[1:]}")
    assert load_rows(write(ROWS, f"c[1]{name[1:]}")) == ROWS, "not those of c1"


def test_a_file_that_is_written_during_its_use_is_named(write):
    """Its rows are read on access, and a mapped file would end the process."""
    rows = open_rows(write(ROWS, "a.jsonl"))
    assert rows[1] == ROWS[1]
    write(ROWS[:1], "a.jsonl")
    with pytest.raises(DamagedFile, match=r"a\.jsonl: was changed during its use"):
        rows[1]


def test_saved_data_sets_and_arrow_files(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(tmp_path / "two")
    assert load_rows(str(tmp_path / "one")) == load_rows(str(tmp_path / "two")) == ROWS
    assert load_rows(str(tmp_path / "two"), kwargs={"split": "test"}) == ROWS[1:]
    assert load_rows(str(tmp_path / "one" / "*.arrow")) == ROWS
    assert load_rows(str(tmp_path / "one"), kwargs={"split": "train"}) == ROWS, "as by default"
    for name, kwargs, why in (
        ("two", {"split": "dev"}, "split 'dev'"),
        ("one", {"split": "test"}, r".*takes no 'split'"),
        ("two", {"splt": "test"}, r".*takes no 'splt'"),
    ):
        with pytest.raises(ValueError, match=f"{name}: cannot be read, {why}"):
            load_rows(str(tmp_path / name), kwargs=kwargs)


@pytest.mark.parametrize(("name", "kwargs"), [("json", {}), ("rows", {"streaming": True})])
def test_a_folder_gives_the_rows_of_its_files(write, tmp_path, monkeypatch, name, kwargs):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    write(ROWS, f"{name}/a.jsonl")
    write(ROWS[:1], "train.jsonl")
    rows = open_rows(name, kwargs=kwargs)
    assert len(rows) == 2 and [*rows] == ROWS


def test_arrow_fills_nested_objects_with_nothing(write, tokenizer, tmp_path, monkeypatch):
    """Templates test 'tool_calls' in message, and rewards compare ground truths."""
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    calls = [{"name": "play", "arguments": {"song": "halo"}}]
    calls.append({"name": "call", "arguments": {"who": "anna", "at": 3}})
    rows = []
    for call in calls:
        asks = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}
        rows.append({"prompt": [CHAT[1], asks, *CHAT], "truth": call})
    template = """{% for m in messages %}{% if 'tool_calls' in m %}{% for c in m.tool_calls %}
        {{- c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    lines, table = (load_prompts(write(rows, name), tokenizer) for name in ("a.jsonl", "a.parquet"))
    monkeypatch.setattr(f"{HERE}.no_rows", lambda: datasets.Dataset.from_list(rows))
    assert [*lines] == [*table] == [*load_prompts(f"{HERE}:no_rows", tokenizer)]
    assert table[0].columns == {"truth": calls[0]}
    assert render(tokenizer, table[1].content) == 'call anna{"who": "anna", "at": 3}playcall anna'


def test_a_file_that_is_absent_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for source in ("data/rows", "./rows", "rows.csv", "data/*.jsonl"):
        with pytest.raises(FileNotFoundError, match="load_rows: no file '"):
            load_rows(source)


def test_a_hub_data_set_is_loaded_by_id(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **how: iter([{"given": given, **how}]))
    with pytest.raises(FileNotFoundError, match="the hub cannot be reached, and its cache has no copy"):
        load_rows("owner/name")  # at once
    monkeypatch.setattr(sources, "hub_responds", lambda: True)
    rows = load_rows("owner/name", kwargs={"revision": "v1"})
    assert rows == [{"given": ("owner/name",), "split": "train", "revision": "v1"}]

    def fails(*given, error, **options):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fails)
    for error, kind, message in (
        (ConnectionError("why"), FileNotFoundError, r"'a/b' is neither a file here nor .* \(why\)"),
        (RuntimeError("why"), ValueError, r"a/b: cannot be read \(why\)"),
        (datasets.exceptions.DatasetGenerationError("why"), ValueError, r"a/b: cannot be read \(why\)"),
    ):
        with pytest.raises(kind, match=message):
            load_rows("a/b", kwargs={"error": error})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "a.jsonl: line 2 is not JSON in UTF-8"),
        ("a.jsonl", b'{"prompt": "a"}\n[1]\n', "a.jsonl: row 1 is a list, expected an object of columns"),
        ("a.jsonl", b'{"prompt": "%s", oops}\n' % (b"x" * 99), r"name .*: character 115\): '\w+\", oops}"),
        ("a.jsonl", b'{"prompt": "%s\xff near"}\n' % ("é" * 99).encode(), "not JSON in UTF-8 .* near"),
        ("a.jsonl", b'{"prompt": "\xe9"}\n', "a.jsonl: line 1 is not JSON in UTF-8"),
        ("a.jsonl", b"[" * 200_000 + b"\n", r"line 1 is not JSON in UTF-8 \(maximum recursion"),
        ("a.json", b'[{"prompt": 1},\n {"prompt": }]', "a.json: is not JSON in UTF-8 .*line 2"),
        ("a.parquet", b"no parquet", "a.parquet: cannot be read"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:10] + b"broken", "cannot be unpacked"),
        ("a.txt", b"prompt\n", "ends with '.txt'; a source is"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_rows(str(path))


def test_a_function_is_called_with_kwargs_and_one_that_does_not_fit_is_named():
    rows = [{"prompt": f"call heldout {i}", "i": i} for i in range(2)]
    before = Path.cwd()
    assert load_rows(f"{HERE}:some_rows", kwargs={"n": 2, "split": "heldout"}) == rows
    assert Path.cwd() == before != Path("/")
    for name, options, message in (
        ("some_row", {}, r"has no function 'some_row'; did you mean some_rows\?"),
        ("some_rows", {"m": 1}, "cannot be called with .*'m'"),
        ("numbered", {}, "returned a int, expected rows"),
    ):
        with pytest.raises(ValueError, match=message):
            load_rows(f"{HERE}:{name}", kwargs=options)


def test_prompts_carry_template_content_and_columns(write, tokenizer):
    prompts = load_prompts(write([*ROWS, {"prompt": CHAT, "label": 2}]), tokenizer)
    assert len(prompts) == prompts.rows == 3
    assert [(each.index, each.columns["label"]) for each in prompts] == [(0, 1), (1, None), (2, 2)]
    assert (prompts[0].content, prompts[2].content) == ("call anna please", tuple(CHAT))
    shown = [tokenizer.decode(list(prompts[i].token_ids)) for i in (0, 2)]
    texts = ("<|user|>callannaplease", "<|system|>play<|user|>callanna")
    assert shown == [f"{text}<|assistant|>" for text in texts]


def test_a_chat_begins_once(write):
    """Llama's template writes the beginning of the text, which its tokenizer would add too."""
    tokenizer = world_tokenizer(vocabulary())
    begin = (tokenizer.bos_token, tokenizer.bos_token_id)
    adds = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.backend_tokenizer.post_processor = adds
    assert tokenizer("call")["input_ids"][0] == begin[1]
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert load_prompts(write(ROWS), tokenizer)[0].token_ids.count(begin[1]) == 1


def test_without_a_template_a_text_is_tokenized_as_it_is(write):
    plain = world_tokenizer(vocabulary())
    for template, why in (("{{ ''.__class__.__mro__ }}", "SecurityError"), ("{# #}", "it prints nothing")):
        plain.chat_template = template
        with pytest.raises(ValueError, match=rf"the tokenizer's chat template fails \({why}"):
            load_prompts(write(ROWS), plain)
    plain.chat_template = None
    ids = load_prompts(write(ROWS), plain)[0].token_ids
    assert plain.convert_ids_to_tokens(list(ids)) == ["call", "anna", "please"]


def test_map_leaves_rows_out_and_keeps_source_numbers(tokenizer):
    prompts = load_prompts(f"{HERE}:some_rows", tokenizer, map=f"{HERE}:odd_ones", kwargs={"n": 6})
    assert (len(prompts), prompts.rows, prompts.mapped_out) == (3, 6, 3)
    assert [prompt.index for prompt in prompts] == [1, 3, 5]
    assert all(prompt.columns["mapped"] for prompt in prompts)
    with pytest.raises(UserCodeError, match=r"no_rows raised TypeError: .* \("):
        load_prompts(f"{HERE}:some_rows", tokenizer, map=f"{HERE}:no_rows")
    with pytest.raises(ValueError, match="row 0 has the column 3, expected a text as its name"):
        load_prompts(f"{HERE}:some_rows", tokenizer, map=f"{HERE}:numbered")
    with pytest.raises(ValueError, match="the data set is empty"):
        load_prompts(f"{HERE}:no_rows", tokenizer)
    with pytest.raises(UserCodeError, match="breaks_off raised KeyError: 'second'"):
        load_prompts(f"{HERE}:breaks_off", tokenizer)
    prompts = load_prompts(f"{HERE}:some_rows", tokenizer, map=f"{HERE}:reused")
    found = [(prompt.content, prompt.columns["tags"]) for prompt in prompts]
    assert found == [("call train 0", [0]), ("call train 1", [0, 1]), ("call train 2", [0, 1, 2])]
    limits = {"map": f"{HERE}:odd_ones", "max_prompt_tokens": 2}
    with pytest.raises(ValueError, match="no row of 3 is left: 2 left out by map, 1 of more than 2 tok"):
        load_prompts(f"{HERE}:some_rows", tokenizer, **limits)


def test_a_digest_covers_long_arrays_and_ids_and_no_order_of_sets(tokenizer):
    digests = {load_prompts(f"{HERE}:with_array", tokenizer, kwargs={"i": i}).digest for i in (0, 1000)}
    other = world_tokenizer(vocabulary()[::-1])
    assert len(digests | {load_prompts(f"{HERE}:with_array", other).digest}) == 3
    assert _plain({"b", "a"}) == ["'a'", "'b'"], "in any order of the hashes"


def test_overlong_prompts_are_dropped_or_cut_and_counted(write, tokenizer):
    texts = ["call anna", "call anna bruno clara david", "play halo"]
    source = write([{"prompt": text} for text in texts])
    dropped = load_prompts(source, tokenizer, max_prompt_tokens=4)
    assert [prompt.index for prompt in dropped] == [0, 2]
    assert (dropped.rows, dropped.dropped_overlong, dropped.truncated) == (3, 1, 0)
    cut = load_prompts(source, tokenizer, max_prompt_tokens=4, overlong="truncate_left")
    assert (len(cut), cut.dropped_overlong, cut.truncated) == (3, 0, 1)
    assert tokenizer.decode(list(cut[1].token_ids)) == "brunoclaradavid<|assistant|>"
    with pytest.raises(ValueError, match="row 1: the prompt has 7 tokens"):
        load_prompts(source, tokenizer, max_prompt_tokens=6, overlong="error")
    assert len(load_prompts(source, tokenizer, max_prompt_tokens=7, overlong="error")) == 3


def test_many_rows_are_read_by_several_processes(write, tokenizer, monkeypatch):
    rows = [{"prompt": "call anna" + " bruno" * (i % 3), "i": i} for i in range(50)]
    limits = {"max_prompt_tokens": 4, "map": f"{HERE}:odd_ones"}
    source, wrong = write(rows), write([*rows[:20], {"prompt": 1}, *rows[:9], {"prompt": 2}], "wrong.jsonl")
    alone = load_prompts(source, tokenizer, **limits)
    pools, make = [], prompts_module.ProcessPoolExecutor
    monkeypatch.setattr(prompts_module, "ProcessPoolExecutor", lambda *a: pools.append(make(*a)) or pools[-1])
    for name, value in {"CHUNK_ROWS": 4, "WORKER_ROWS": 10}.items():
        monkeypatch.setattr(prompts_module, name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    shared = load_prompts(source, tokenizer, **limits)
    assert pools[0]._max_workers == 3
    assert (vars(shared) | {"make": 0}, [*shared]) == (vars(alone) | {"make": 0}, [*alone])
    with pytest.raises(ValueError, match=r"wrong.jsonl: row 20: column 'prompt' is a int"):
        load_prompts(wrong, tokenizer)
    assert len(pools) == 2 and not multiprocessing.active_children()


def test_prompts_are_tokenized_on_access_and_a_long_line_not_at_all(write, tokenizer, monkeypatch):
    seen, tokens = [], Encoder.tokens
    monkeypatch.setattr(Encoder, "tokens", lambda self, texts: seen.extend(texts) or tokens(self, texts))
    rows = [{"prompt": "call anna"}] * 500 + [{"prompt": "anna " * 100_000}]
    source = write(rows)
    found = load_prompts(source, tokenizer, max_prompt_tokens=64)
    assert (len(found), found.dropped_overlong) == (500, 1)
    with pytest.raises(ValueError, match=r"row 500: the prompt has at least 781\d tokens"):
        load_prompts(source, tokenizer, max_prompt_tokens=64, overlong="error")
    assert sum(map(len, seen)) < 5000
    seen.clear()
    assert found[7].token_ids == found[8].token_ids and len(seen) == 2


def test_evaluation_prompts_have_a_limit_of_their_own_and_are_never_dropped(write, tokenizer):
    rows = [{"prompt": "call anna bruno clara david"}, ROWS[0]]  # 7 tokens, and 5
    both = {name: {"source": write(rows, f"{name}.jsonl")} for name in ("train", "evaluation")}
    read = partial(read_inputs, tokenizer=tokenizer, demonstrations=False)
    changes = {"data": {**both, "max_prompt_tokens": 5, "max_evaluation_tokens": 7}}
    settings = Settings.model_validate(SETTINGS | changes)
    assert settings.longest_sequence == 7 + settings.rollout.max_new_tokens
    found = read(settings)
    assert (len(found.train), found.train.dropped_overlong, len(found.held_out)) == (1, 1, 2)
    changes["data"] |= {"max_evaluation_tokens": 4, "overlong": "truncate_left"}
    found = read(Settings.model_validate(SETTINGS | changes))
    assert [len(prompt.token_ids) for prompt in found.train] == [5, 5]
    assert [len(prompt.token_ids) for prompt in found.held_out] == [4, 4]
    changes["data"] |= {"overlong": "drop"}
    with pytest.raises(UnusableInput, match=r"data\.evaluation: .*row 0: the prompt has 7 tokens"):
        read(Settings.model_validate(SETTINGS | changes))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": None}, "row 1: column 'prompt' is None, expected a text or a list of chat messages"),
        ({"prompt": []}, r"row 1: column 'prompt': the last message is empty, expected a text"),
        ({"promt": "a"}, r"row 1: no column 'prompt'; did you mean promt\?; there are 'promt'"),
        ({"prompt": ["call"]}, "row 1: column 'prompt': message 0 is 'call', expected an object with a"),
        ({"prompt": [{**CHAT[1], "content": [{"type": "image"}]}]}, "message 0 has the part .*'image'.*, e"),
        ({"prompt": "a", "tools": "[3]"}, r"row 1: tools is '\[3\]', expected a list of JSON"),
        ({"prompt": "a", "tools": "[" * 100_000}, r"row 1: tools is '\[\[.*expected a list of JSON"),
        ({"prompt": "a", "chat_template_kwargs": "{think"}, "row 1: chat_template_kwargs is '{think', exp"),
        ({"prompt": "a", "chat_template_kwargs": [1]}, r"row 1: chat_template_kwargs is '\[1\]', expected"),
        ({"prompt": [{**CHAT[1], "content": None}]}, "message 0 is .*expected texts role and content"),
        ({"prompt": "a", "training_step": 1}, "row 1: got the column 'training_step', expected another name"),
        ({"prompt": "a \ud800 b"}, r"row 1: column 'prompt' has '\\ud800' at 2, half of a pair"),
    ],
)
def test_a_bad_prompt_is_named_with_source_and_row(write, tokenizer, bad, message):
    source = write([ROWS[0], bad])
    with pytest.raises(ValueError, match=message) as error:
        load_prompts(source, tokenizer)
    assert source in str(error.value)


def test_demonstrations_end_with_the_end_of_sequence(tokenizer):
    kwargs = {"n": 50, "seed": 1}
    found = load_demonstrations(f"{WORLD}:demonstrations", tokenizer, kwargs=kwargs)
    for (prompt_ids, completion_ids), row in zip(found, demonstrations(**kwargs), strict=True):
        assert completion_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(list(completion_ids[:-1])) == row["completion"]
        assert prompt_ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")
    with pytest.raises(ValueError, match="row 0: no column 'answer'"):
        load_demonstrations(f"{WORLD}:demonstrations", tokenizer, kwargs=kwargs, completion_column="answer")


@settings(deadline=None)
@given(n=st.integers(1, 40), batch_size=st.integers(1, 100), epochs=st.integers(1, 4), seed=st.integers(0, 9))
def test_every_prompt_comes_once_an_epoch(n, batch_size, epochs, seed):
    steps = -(-n * epochs // batch_size)
    batches = [batch_indices(n, batch_size, step, seed) for step in range(steps)]
    assert {len(batch) for batch in batches} == {batch_size}
    order = [index for batch in batches for index in batch]
    for epoch in range(epochs):
        assert sorted(order[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert max(Counter(order[: n * epochs]).values()) == epochs
    assert batch_indices(100, 100, 0, seed) != batch_indices(100, 100, 0, seed + 1)
    assert batch_indices(100, 100, 0, seed) != batch_indices(100, 100, 1, seed)
