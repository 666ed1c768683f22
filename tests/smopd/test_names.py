"""Secrets and control characters do not reach files and terminals."""

import json

import pytest

from smopd.config.recipe import load, write_yaml
from smopd.config.settings import Settings, merged
from smopd.names import REDACTED, printable, redacted

NOT_SAID, BEGIN = "Hunter2Hunter2", "-----BEGIN RSA PRIVATE KEY-----"
ALONE = [  # of which nothing else is hidden
    {"headers": {"Authorization": NOT_SAID}},
    {"openai_key": NOT_SAID},
    {"api_keys": [NOT_SAID, NOT_SAID]},
    {"apiKey": NOT_SAID, "accessToken": NOT_SAID},
    {"credentials": {"for": NOT_SAID}},
    f"http://h/v1?a=1&api_key={NOT_SAID}&b=2",
    f"http://h/v1?X-Amz-Security-Token={NOT_SAID}&sig={NOT_SAID}",
    f"X-Api-Key: {NOT_SAID}",
    f"'url': 'h?a=1&api_key={NOT_SAID}'",
    f"--judge.url 'h?api_key={NOT_SAID}&b'",
    ["--api-key", NOT_SAID, "-v"],
    f"Password: {NOT_SAID}",
    f"curl --openai-key={NOT_SAID} x",
    f'{{"client_secret": "{NOT_SAID}"}}',
]
HIDDEN = {  # value -> what is left of it
    "pair": ({"auth": ["user", NOT_SAID]}, {"auth": [REDACTED, REDACTED]}),
    "number": ({"pwd": 12345678}, {"pwd": REDACTED}),
    "header": (f"Authorization: Basic {NOT_SAID}", f"Authorization: {REDACTED}"),
    "bearer": (f"bad value b'Bearer {NOT_SAID}\\n{NOT_SAID}'", f"bad value b'Bearer {REDACTED}'"),
    "in words": (f'"pwd": "a b, {NOT_SAID}&{NOT_SAID}"', f'"pwd": "{REDACTED}"'),
    "in JSON in JSON": (f'"{{\\"pwd\\": \\"{NOT_SAID} x\\"}}"', f'"{{\\"pwd\\": \\"{REDACTED}\\"}}"'),
    "option and value": (f"--r.0.pwd '{NOT_SAID} {NOT_SAID}' -v", f"--r.0.pwd '{REDACTED}' -v"),
    "mapping": (f"'secret': {{'of': '{NOT_SAID}'}}, 1", f"'secret': {REDACTED}, 1"),
    "list": (f'"api_keys": ["{NOT_SAID}", "{NOT_SAID}"], 1', f'"api_keys": {REDACTED}, 1'),
    "without a name": ("Basic dXNlcjpodW50ZXIy", f"Basic {REDACTED}"),
    "random": ("is Zk3hT9wQ2mX7vB4nC8sD1fG6jL5pR0tY", f"is {REDACTED}"),
    "key file": (f"{BEGIN}\n{NOT_SAID}\n-----END", f"{BEGIN}{REDACTED}-----END"),
    "user": (f"postgres://u:p@{NOT_SAID}@host/db", "postgres://host/db"),
    "OpenAI's": ("with sk-proj-Ab3dEf6h", f"with {REDACTED}"),
    "the hub's": ("hf_AbCdEfGhIjKlMnOpQr", REDACTED),
    "a web token": ("eyJhbGciOi.eyJzdWIi.SflKxw_-", REDACTED),
    "of the environment": ("says its-own-form", f"says {REDACTED}"),
}


@pytest.mark.parametrize("value", ALONE, ids=str)
def test_a_secret_alone_is_hidden(value):
    expected = json.loads(json.dumps(value).replace(NOT_SAID, REDACTED))
    assert redacted({"kwargs": [value]})["kwargs"] == [expected]
    assert not isinstance(value, str) or printable(value) == expected


@pytest.mark.parametrize(("value", "expected"), HIDDEN.values(), ids=HIDDEN)
def test_what_is_hidden_with_a_secret(value, expected, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "its-own-form")
    found = redacted({"kwargs": [value]})["kwargs"][0]
    assert found == expected
    if isinstance(value, str):
        assert printable(value) == found


def test_long_text_is_searched_in_linear_time():
    text = "a" * 100_000 + "sk-" * 30_000 + "x.y-" * 30_000 + "a://" * 10_000 + "eyJ-" * 30_000
    assert printable(text) == text


def test_what_is_no_secret_is_kept(monkeypatch):
    """A run's settings are compared as they are written."""
    monkeypatch.setenv("PWD", "/data/models")
    monkeypatch.setenv("EMPTY_TOKEN", " " * 9)
    plain = {
        "path": "/data/models/task-12345678",
        "url": "http://host:8000/v1?key=1&max_tokens=5",
        "author": "sk-learn",
        "cache": "hf_home_directory_of_all",
        "commit": "5e0c8d1b7a9f4e2d3c6b8a0f1e2d3c4b5a69788d",
        "class": "Qwen2ForSequenceClassification2ForConditionalGeneration",
        "words": "Basic principles --max-tokens 32 --tokenizer path, a token: so",
        "kappa": 16,
        "use_auth": True,
        "text": "a bearer token: max_new_tokens=32, opd.tail: got 'x', write to a@b.c",
    }
    run, path = {"stage": "train", "label": "a"}, "no_secret:reward"
    plain["runs"] = dict.fromkeys(["token", "no_auth", "api_key"], run)
    imported = ("function", "source", "map", "factory", "environment", "target", "optimizer")
    plain |= dict.fromkeys(imported, path) | {"trackers": [path]}
    assert redacted(plain) == plain and printable(plain["text"]) == plain["text"]
    settings = load("quickstart").values
    assert redacted(settings) == settings


def test_a_secret_in_a_run_that_is_named_as_one_is_hidden():
    def runs(secret):
        kwargs = {
            "password": secret,
            "url": f"http://h/v1?api_key={secret}",
            "runs": {"password": {"db": secret}},
        }
        return {"runs": {"token": {"stage": "train", "set": {"rollout": {"environment_kwargs": kwargs}}}}}

    assert redacted(runs(NOT_SAID)) == runs(REDACTED)


def test_a_users_arguments_hold_no_import_paths_of_ours(monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", NOT_SAID)
    assert redacted({"kwargs": {"target": f"admin:{NOT_SAID}"}}) == {
        "kwargs": {"target": f"admin:{REDACTED}"}
    }


def test_settings_are_written_without_secrets():
    recipe = load("quickstart").values
    rewards = [{**reward, "kwargs": {"api_key": "sk-1"}} for reward in recipe["rewards"]]
    settings = Settings.model_validate(merged(recipe, {"rewards": rewards}))
    assert "sk-1" in write_yaml(settings) and "sk-1" not in write_yaml(settings, public=True)


def test_lines_for_a_terminal():
    found = printable("http://user:pass@host:8000/v1 is out\x1b[2J\tx\n")
    assert found == "http://host:8000/v1 is out\ufffd[2J\tx\n"
