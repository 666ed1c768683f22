"""Prompt sources: every form, what is counted, and what each mistake in the data answers."""

import gzip
import json
import subprocess
import sys
from collections import Counter

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers.processors import TemplateProcessing

from smopd.config.settings import Settings
from smopd.data.prompts import batch_indices, load_demonstrations, load_prompts
from smopd.data.sources import load_rows
from smopd.run.failures import UnusableInput
from smopd.run.inputs import read_inputs
from smopd.worlds.models import world_tokenizer
from smopd.worlds.toy_world import vocabulary

ROWS = [{"prompt": "call anna please", "label": 1}, {"prompt": "play imagine at 3", "label": None}]
CHAT = [{"role": "system", "content": "play"}, {"role": "user", "content": "call anna"}]
HERE = __name__


def some_rows(n=3, split="train"):
    return [{"prompt": f"call {split} {i}", "i": i} for i in range(n)]


class Shop:
    @staticmethod
    def rows():
        return some_rows(1)


def no_rows():
    return []


def rows_of_texts():
    return ["call anna"]


def one_number():
    return 3


def odd_ones(row):
    return {**row, "mapped": True} if row["i"] % 2 else None


def nothing(row):
    return None


@pytest.fixture(scope="module")
def tokenizer():
    return world_tokenizer(vocabulary())


@pytest.fixture(scope="module")
def plain_tokenizer():
    tokenizer = world_tokenizer(vocabulary())
    tokenizer.chat_template = None
    return tokenizer


@pytest.fixture
def write(tmp_path):
    def write_file(rows, name="rows.jsonl"):
        path = tmp_path / name
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(lines.encode()))
        elif name.endswith(".parquet"):
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text(lines, encoding="utf-8")
        return str(path)

    return write_file


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.parquet"])
def test_files_of_every_form_give_the_same_rows(write, name):
    source = write(ROWS, name)
    assert load_rows(source) == ROWS


def test_a_function_is_called_with_kwargs():
    assert load_rows(f"{HERE}:some_rows", kwargs={"n": 2}) == some_rows(2)
    assert load_rows(f"{HERE}:Shop.rows") == some_rows(1)
    kwargs = {"n": 2, "split": "heldout"}
    assert load_rows(f"{HERE}:some_rows", kwargs=kwargs) == some_rows(2, "heldout")


def test_a_hub_data_set_is_loaded_by_id(monkeypatch):
    import datasets

    asked = []

    def load_dataset(source, **options):
        asked.append((source, options))
        return iter(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows("owner/name", kwargs={"revision": "v1"}) == ROWS
    assert asked == [("owner/name", {"split": "train", "revision": "v1"})]


def test_an_unreachable_hub_data_set_says_so(monkeypatch):
    import datasets

    def load_dataset(source, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(FileNotFoundError, match=r"'owner/name' is no file here and .* \(no network\)"):
        load_rows("owner/name")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', r"rows.jsonl: line 2 is no JSON"),
        (b'{"prompt": "a"}\n[1]\n', r"rows.jsonl: row 1 is a list, expected an object of columns"),
        (b'{"prompt": "\xe9"}\n', r"rows.jsonl: cannot be read as UTF-8 text"),
        (
            b'{"prompt": "a"}\n{"n": ' + b"1" * 5000 + b"}\n",
            r"rows.jsonl: line 2 is no JSON \(Exceeds the limit",
        ),
        (b'{"prompt": "a"}\n' + b"[" * 200_000 + b"\n", r"rows.jsonl: line 2 is no JSON \(maximum recursion"),
    ],
)
def test_a_broken_line_is_named(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_rows(str(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"prompt": "a"}', "holds one dict, expected a list of objects or JSON lines"),
        ("a.json", b'[{"prompt": }]', "a.json: line 1 is no JSON"),
        ("a.json", b"[" + b"1" * 5000 + b"]", r"a.json: cannot be read as JSON \(Exceeds the limit"),
        ("a.json", b"[" * 200_000, r"a.json: cannot be read as JSON \(maximum recursion"),
        ("a.parquet", b"no parquet", "is no parquet file"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.csv", b"prompt\n", "has no known ending"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_rows(str(path))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("absent_module:rows", {}, "'absent_module:rows': No module named"),
        (f"{HERE}:some_row", {}, r"has no function 'some_row'; did you mean some_rows\?"),
        (f"{HERE}:Shop.row", {}, r"has no function 'row'; did you mean rows\?"),
        (f"{HERE}:some_rows", {"kwargs": {"m": 1}}, "cannot be called with .*'m'"),
        (f"{HERE}:one_number", {}, "returned a int, expected rows"),
        (f"{HERE}:rows_of_texts", {}, "row 0 is a str, expected an object of columns"),
    ],
)
def test_a_function_that_does_not_fit_is_named(source, options, message):
    with pytest.raises(ValueError, match=message):
        load_rows(source, **options)


def test_prompts_carry_template_content_and_columns(write, tokenizer):
    prompts = load_prompts(write([*ROWS, {"prompt": CHAT, "label": 2}]), tokenizer)
    assert len(prompts) == prompts.rows == 3
    assert [prompt.index for prompt in prompts] == [0, 1, 2]
    assert tokenizer.convert_ids_to_tokens(list(prompts[0].token_ids)) == [
        "<|user|>", "call", "anna", "please", "<|assistant|>",
    ]  # fmt: skip
    assert prompts[0].content == "call anna please"
    assert [dict(prompt.columns) for prompt in prompts] == [{"label": 1}, {"label": None}, {"label": 2}]
    assert prompts[2].content == tuple(CHAT)
    assert tokenizer.decode(list(prompts[2].token_ids)) == "<|system|>play<|user|>callanna<|assistant|>"
    assert [prompt.index for prompt in prompts[1:]] == [1, 2]


def test_a_chat_begins_once(write):
    """Llama's template writes the beginning of the text, which its tokenizer would add too."""
    tokenizer = world_tokenizer(vocabulary())
    begin = (tokenizer.bos_token, tokenizer.bos_token_id)
    adds = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.backend_tokenizer.post_processor = adds
    assert tokenizer("call")["input_ids"][0] == begin[1]
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert load_prompts(write(ROWS), tokenizer)[0].token_ids.count(begin[1]) == 1


def test_without_a_template_a_text_is_tokenised_as_it_is(write, tokenizer, plain_tokenizer):
    source = write(ROWS)
    expected = ["call", "anna", "please"]
    for used, chat in ((plain_tokenizer, "auto"), (tokenizer, False)):
        ids = load_prompts(source, used, chat=chat)[0].token_ids
        assert tokenizer.convert_ids_to_tokens(list(ids)) == expected
    with pytest.raises(ValueError, match="chat is true, and the tokenizer has no chat template"):
        load_prompts(source, plain_tokenizer, chat=True)
    with pytest.raises(ValueError, match="prompts are chat messages, and no chat template is applied"):
        load_prompts(write([{"prompt": CHAT}], "chat.jsonl"), plain_tokenizer)


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}{% endfor %}", "{{ 1/0 }}"]
)
def test_a_chat_template_that_fails_is_named(write, template):
    tokenizer = world_tokenizer(vocabulary())
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="the tokenizer's chat template fails"):
        load_prompts(write(ROWS), tokenizer)


def test_map_leaves_rows_out_and_keeps_source_numbers(tokenizer):
    prompts = load_prompts(f"{HERE}:some_rows", tokenizer, map=f"{HERE}:odd_ones", kwargs={"n": 6})
    assert (len(prompts), prompts.rows, prompts.mapped_out) == (3, 6, 3)
    assert [prompt.index for prompt in prompts] == [1, 3, 5]
    assert all(prompt.columns["mapped"] for prompt in prompts)


def test_overlong_prompts_are_dropped_cut_or_refused_and_counted(write, tokenizer):
    source = write(
        [{"prompt": "call anna"}, {"prompt": "call anna bruno clara david"}, {"prompt": "play halo"}]
    )
    dropped = load_prompts(source, tokenizer, max_prompt_tokens=4)
    assert [prompt.index for prompt in dropped] == [0, 2]
    assert (dropped.rows, dropped.dropped_overlong, dropped.truncated) == (3, 1, 0)
    cut = load_prompts(source, tokenizer, max_prompt_tokens=4, overlong="truncate_left")
    assert (len(cut), cut.dropped_overlong, cut.truncated) == (3, 0, 1)
    assert tokenizer.decode(list(cut[1].token_ids)) == "brunoclaradavid<|assistant|>"
    with pytest.raises(
        ValueError, match="row 1: the prompt has 7 tokens, expected at most max_prompt_tokens = 4"
    ):
        load_prompts(source, tokenizer, max_prompt_tokens=4, overlong="error")
    exact = load_prompts(source, tokenizer, max_prompt_tokens=7, overlong="error")
    assert len(exact) == 3


def test_evaluation_prompts_have_a_limit_of_their_own(write, tokenizer):
    long = {"prompt": "call anna bruno clara david"}  # 7 tokens
    values = {
        "name": "t",
        "model": {"factory": "m:f"},
        "rewards": [{"name": "r", "function": "m:f"}],
        "runs": {"gdpo": {"stage": "train"}},
        "rollout": {"max_new_tokens": 10},
    }

    def read(**data):
        both = {name: {"source": write([long, ROWS[0]], f"{name}.jsonl")} for name in ("train", "evaluation")}
        made = Settings.model_validate({**values, "data": {**both, "max_prompt_tokens": 5, **data}})
        return made.longest_sequence, read_inputs(made, tokenizer, demonstrations=False)

    longest, found = read(max_evaluation_tokens=7)
    assert longest == 7 + 10 and (len(found.train), found.train.dropped_overlong) == (1, 1)
    assert (len(found.held_out), found.held_out.dropped_overlong, found.held_out.truncated) == (2, 0, 0)
    longest, found = read(max_evaluation_tokens=4, overlong="truncate_left")
    assert longest == 5 + 10 and [len(prompt.token_ids) for prompt in found.train] == [5, 5]
    assert [len(prompt.token_ids) for prompt in found.held_out] == [4, 4] and found.held_out.truncated == 2
    with pytest.raises(UnusableInput, match=r"data\.evaluation: .*row 0: the prompt has 7 tokens"):
        read()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": None}, "row 1: column 'prompt' is None, expected a text or a list of chat messages"),
        ({"prompt": "  "}, "row 1: column 'prompt' is '  ', expected a text"),
        ({"prompt": []}, r"row 1: column 'prompt': the last message is empty, expected a text"),
        ({"prompt": 7}, "row 1: column 'prompt' is a int, expected a text"),
        ({"promt": "a"}, r"row 1 has no column 'prompt'; did you mean promt\?; it has 'promt'"),
        (
            {"prompt": ["call"]},
            "row 1: column 'prompt': message 0 is 'call', expected texts role and content",
        ),
        ({"prompt": [{"role": "user", "content": None}]}, "message 0 is .*expected texts role and content"),
        ({"prompt": [{"role": "user", "content": " "}]}, "row 1: .* the last message is empty"),
        ({"prompt": "a \ud800 b"}, r"row 1: column 'prompt' has '\\ud800' at 2, half of a pair"),
        (
            {"prompt": [{"role": "user", "content": "\udfff"}]},
            "row 1: column 'prompt': message 0 has .* half",
        ),
    ],
)
def test_a_bad_prompt_is_named_with_source_and_row(write, tokenizer, bad, message):
    source = write([ROWS[0], bad])
    with pytest.raises(ValueError, match=message) as error:
        load_prompts(source, tokenizer)
    assert source in str(error.value)


@pytest.mark.parametrize("name", ["prompts", "completions", "training_step"])
def test_columns_named_as_arguments_of_rewards_are_refused(write, tokenizer, name):
    source = write([ROWS[0], {**ROWS[1], name: "x"}])
    with pytest.raises(ValueError, match=f"row 1: column '{name}' has the name of an argument") as error:
        load_prompts(source, tokenizer)
    assert source in str(error.value)
    named = write([{name: "call anna"}], "named.jsonl")
    assert load_prompts(named, tokenizer, prompt_column=name)[0].columns == {}


def test_an_empty_data_set_says_why(write, tokenizer):
    with pytest.raises(ValueError, match="the data set is empty"):
        load_prompts(f"{HERE}:no_rows", tokenizer)
    with pytest.raises(ValueError, match=r"none of 3 rows is left: 3 left out by map$"):
        load_prompts(f"{HERE}:some_rows", tokenizer, map=f"{HERE}:nothing")
    with pytest.raises(ValueError, match=r"none of 2 rows is left: 2 of more than 2 tokens$"):
        load_prompts(write(ROWS), tokenizer, max_prompt_tokens=2)


def test_demonstrations_end_with_the_end_of_sequence(tokenizer):
    found = load_demonstrations(
        "smopd.worlds.toy_world:demonstrations", tokenizer, kwargs={"n": 50, "seed": 1}
    )
    from smopd.worlds.toy_world import demonstrations

    for (prompt_ids, completion_ids), row in zip(found, demonstrations(50, 1), strict=True):
        assert completion_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(list(completion_ids[:-1])) == row["completion"]
        assert prompt_ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")


def test_overlong_and_empty_demonstrations(write, tokenizer):
    rows = [{"prompt": "call anna", "answer": "Sure."}, {"prompt": "call anna", "answer": "Sure. Done."}]
    found = load_demonstrations(write(rows), tokenizer, completion_column="answer", max_tokens=7)
    assert (len(found), found.rows, found.dropped_overlong) == (1, 2, 1)
    with pytest.raises(ValueError, match="row 0: column 'answer' is '', expected a text"):
        load_demonstrations(write([{"prompt": "a", "answer": ""}]), tokenizer, completion_column="answer")
    with pytest.raises(ValueError, match="none of 2 rows is left"):
        load_demonstrations(write(rows), tokenizer, completion_column="answer", max_tokens=2)


@settings(deadline=None)
@given(n=st.integers(1, 40), batch_size=st.integers(1, 100), epochs=st.integers(1, 4), seed=st.integers(0, 9))
def test_every_prompt_comes_once_an_epoch(n, batch_size, epochs, seed):
    steps = -(-n * epochs // batch_size)
    batches = [batch_indices(n, batch_size, step, seed) for step in range(steps)]
    assert {len(batch) for batch in batches} == {batch_size}
    assert batch_indices(n, batch_size, steps - 1, seed) == batches[-1]
    order = [index for batch in batches for index in batch]
    for epoch in range(epochs):
        assert sorted(order[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert max(Counter(order[: n * epochs]).values()) == epochs
    assert batch_indices(100, 100, 0, seed) != batch_indices(100, 100, 0, seed + 1)
    assert batch_indices(100, 100, 0, seed) != batch_indices(100, 100, 1, seed)


def test_importing_data_loads_no_heavy_package():
    heavy = "{'torch', 'transformers', 'datasets', 'pyarrow'}"
    modules = "smopd.data.prompts, smopd.data.__main__, smopd.data.fetch, smopd.worlds.toy_world"
    code = f"import sys, {modules}; assert not {heavy} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
