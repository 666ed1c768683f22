"""Chats as the chat template renders them, and the text of responses that rewards get."""

import json

import pytest

from examples.rlla_scratch import CHATML_TEMPLATE
from smopd.data.chat import render, response_start
from smopd.data.prompts import load_prompts
from tests.smopd.recipes import write_lines
from tests.smopd.rewards.tiny_preference import byte_tokenizer

ASKED = {"role": "user", "content": "2+2?"}
HEADER = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{% if not think %}off;{% endif %}" + CHATML_TEMPLATE
THINK = CHATML_TEMPLATE.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
CLOSED = THINK.replace("<think>\\n", "<think>\\n\\n</think>\\n\\n")


@pytest.fixture
def prompts(tmp_path):
    def load(rows, template=CHATML_TEMPLATE, **options):
        path = write_lines(tmp_path / "rows.jsonl", rows)
        return load_prompts(str(path), byte_tokenizer(template=template), **options)

    return load


def text_of(prompt):
    return byte_tokenizer().decode(list(prompt.token_ids))


def test_the_template_gets_tools_and_arguments_of_settings_and_rows(prompts, caplog):
    schema = {"type": "function", "function": {"name": "add"}}
    rows = [
        {"prompt": [ASKED], "tools": [schema]},
        {"prompt": [ASKED], "tools": [json.dumps(schema)], "chat_template_kwargs": {"think": False}},
        {"prompt": [ASKED], "tools": json.dumps([schema]), "chat_template_kwargs": {"think": True}},
        {"prompt": [ASKED], "tools": []},
    ]
    found = prompts(rows, TOOLS, chat_template_kwargs={"think": True})
    shown = json.dumps([schema])
    texts = [shown + HEADER, f"{shown}off;{HEADER}", shown + HEADER, HEADER]
    assert [text_of(prompt) for prompt in found] == texts
    assert found[0].columns == {"tools": [schema]}, "rewards get them too"
    assert not caplog.messages and prompts(rows) and "chat template leaves out" in caplog.text


def test_a_last_assistant_message_is_continued(prompts):
    started = {"role": "assistant", "content": "<think> let me"}
    prompt = prompts([{"prompt": [ASKED, started]}])[0]
    assert text_of(prompt) == HEADER + "<think> let me" and prompt.response_start == "<think> let me"


def test_a_chat_in_json_and_content_in_parts(prompts):
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    chats = [[ASKED], json.dumps([ASKED], indent=1), [{"role": "user", "content": parts}], '[{"a": 1}]']
    texts = [text_of(prompt) for prompt in prompts([{"prompt": chat} for chat in chats])]
    assert texts == [HEADER, HEADER, HEADER.replace("2+2", "2+\n2"), HEADER.replace("2+2?", '[{"a": 1}]')]
    found = prompts([{"prompt": chat} for chat in chats], PARTS)
    assert [text_of(prompt) for prompt in found][:3] == ["2+2?"] * 3
    prints = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert text_of(prompts([{"prompt": chats[2]}], prints)[0]) == "2+\n2?"


@pytest.mark.parametrize(
    ("template", "start"),
    [(CHATML_TEMPLATE, ""), (THINK, "<think>\n"), (CLOSED, ""), (PARTS, ""), (None, "")],
    ids=["header", "think", "no thinking", "no header", "no template"],
)
def test_a_tag_that_the_template_opens_begins_the_response(template, start):
    tokenizer = byte_tokenizer(template=template)
    assert response_start(tokenizer, "2+2?") == start
    if start:
        assert render(tokenizer, "2+2?") == HEADER + start
