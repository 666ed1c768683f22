"""Environments of verifiers as they are, where `pip install "verifiers<0.2"` is."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="verifiers<0.2 excludes the datasets that TRL needs")

from smopd.data.prompts import load_prompts
from smopd.integrations.verifiers import rows
from smopd.rewards.environments import EnvironmentHost
from smopd.worlds.models import world_tokenizer
from smopd.worlds.toy_world import vocabulary
from tests.smopd.recipes import metric_lines, train_here, write_recipe

GUESS = """
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["left"] = 2

    cleaned = 0

    @vf.cleanup
    async def clean(self, state):
        self.cleaned += 1

    async def env_response(self, messages, state, **kwargs):
        state["left"] -= 1
        if state["left"] == 0 or state["answer"] in messages[-1].content:
            state["final_env_response"] = [{"role": "user", "content": "over"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"call {state['answer'][0]}"}]

def right(completion, answer):
    return float(answer in completion[-1]["content"])

def load_environment(n=8, seed=0):
    rows = [{"question": f"call {name}", "answer": name} for name in ["anna", "bruno"] * (n // 2)]
    return Guess(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=3)
"""
TOOLS = """
import verifiers as vf
from datasets import Dataset

def double(x: int) -> int:
    \"\"\"Double x.\"\"\"
    return 2 * x

def load_environment():
    rows = [{"question": "call anna", "answer": "8"}]
    return vf.ToolEnv(tools=[double], dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[]))
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in (("guess", GUESS), ("some_tools", TOOLS)):
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path


def answers(name: str, row: dict, *texts: str) -> list:
    """Return what the environment answers to each text, in a worker's host."""
    host, loop = EnvironmentHost("verifiers", {"name": name}, 10.0), asyncio.new_event_loop()
    found = [host.reply(loop, True, {0: row})]
    found += [host.reply(loop, False, {0: said(text)}) for text in texts]
    for rollout in asyncio.all_tasks(loop):  # or the garbage collector ends it, at any time
        rollout.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    return [each for (each,) in found]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ROW = {"prompt": [{"role": "user", "content": "call anna"}], "answer": "anna"}


def test_an_environments_own_rollout_answers_and_ends() -> None:
    began, hint, over = answers("guess", ROW, "bruno", "clara")
    assert began == over == {"messages": None}
    assert hint == {"messages": [{"role": "user", "content": "call a"}]}
    assert answers("guess", ROW, "it is anna")[1] == {"messages": None}
    other = {**ROW, "prompt": [{"role": "user", "content": "play"}]}
    assert answers("guess", other)[0] == {"messages": None}


def test_tools_are_called_and_a_bad_call_is_answered() -> None:
    call = '<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call>'
    _, eight, wrong, end = answers("some_tools", ROW, call, "<tool_call>{", "it is 8")
    assert eight == {"messages": [{"role": "tool", "content": "8"}]}
    assert wrong["messages"][0]["role"] == "tool" and "8" not in wrong["messages"][0]["content"]
    assert end == {"messages": None}


def test_rows_are_the_environments() -> None:
    source = "smopd.integrations.verifiers:rows"
    prompts = load_prompts(source, world_tokenizer(vocabulary()), kwargs={"name": "guess", "n": 4})
    assert [prompt.columns["answer"] for prompt in prompts] == ["anna", "bruno"] * 2
    (tools,) = rows("some_tools")["tools"]
    assert json.loads(tools)[0]["function"]["parameters"]["properties"].keys() == {"x"}


def test_a_conversation_that_the_sampler_ends_is_cleaned_up() -> None:
    host, loop = EnvironmentHost("verifiers", {"name": "guess"}, 10.0), asyncio.new_event_loop()
    for batch in ({0: ROW, 1: ROW}, {0: ROW}, {}):
        host.reply(loop, True, batch)
    loop.close()
    assert host.environment.environment.cleaned == 3


def test_a_run_trains_in_an_environment(place: Path) -> None:
    named = {"name": "guess"}
    rewards = [
        {"name": "right", "function": "guess:right", "range": [0, 1]},
        {"name": "short", "function": "short:short", "range": [0, 1]},
    ]
    (place / "short.py").write_text(
        "def short(prompts, completions, **columns):\n    return [1 / (1 + len(x)) for x in completions]\n"
    )
    changes = {
        "data": {
            "train": {"source": "smopd.integrations.verifiers:rows", "kwargs": named},
            "evaluation": None,
        },
        "rewards": rewards,
        "rollout": {"environment": "verifiers", "environment_kwargs": named, "turns": 3, "max_new_tokens": 8},
        "loop": {"steps": 2},
    }
    recipe = write_recipe(place, changes, drop=("warm_start", "runs", "teachers"))
    recipe.write_text(recipe.read_text() + "runs: {alone: {stage: train}}\n")
    done = train_here(recipe)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = metric_lines(place / "runs/tiny/alone")
    ends = ("conversation/ended/exception", "conversation/ended/worker_died", "reward/right/unscorable")
    assert all(line[name] == 0 for line in lines for name in ends)
