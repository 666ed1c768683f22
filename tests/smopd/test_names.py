"""Secrets and control characters do not reach files and terminals."""

from __future__ import annotations

from smopd.config.recipe import load, write_yaml
from smopd.config.settings import Settings, merged
from smopd.names import REDACTED, printable, redacted

URL = "http://user:pass@host:8000/v1"


def test_secrets_by_name_and_users_of_urls_are_left_out_of_files():
    values = {
        "api_key": "sk-1",
        "nested": [{"Password": "x", "hf_token": "y", "access-key": "z", "client_secret": "w"}],
        "url": URL,
        "max_new_tokens": 32,
        "tokenizer": "path",
        "token": None,
    }
    assert redacted(values) == {
        "api_key": REDACTED,
        "nested": [dict.fromkeys(("Password", "hf_token", "access-key", "client_secret"), REDACTED)],
        "url": "http://host:8000/v1",
        "max_new_tokens": 32,
        "tokenizer": "path",
        "token": None,
    }


def test_settings_are_written_without_secrets():
    recipe = load("quickstart").values
    rewards = [{**reward, "kwargs": {"api_key": "sk-1"}} for reward in recipe["rewards"]]
    settings = Settings.model_validate(merged(recipe, {"rewards": rewards}))
    assert "sk-1" in write_yaml(settings) and "sk-1" not in write_yaml(settings, public=True)


def test_lines_for_a_terminal():
    assert printable(f"{URL} is out\x1b[2J\tx\n") == "http://host:8000/v1 is out\ufffd[2J\tx\n"
