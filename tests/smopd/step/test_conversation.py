"""Conversations: tokens, masks and endings, draws, drift of the template, and environments that fail."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from smopd.config.settings import Reward, Settings
from smopd.data.prompts import Prompt
from smopd.engine.local.rollout import LocalRollout
from smopd.engine.types import Rollout, Sampling
from smopd.names import ENVIRONMENT_THREADS
from smopd.rewards.environments import Answer, EnvironmentHost, checked
from smopd.rewards.pool import RewardError, RewardPool
from smopd.step.conversation import Conversations, Environments
from smopd.step.rewards import Rewarder
from smopd.worlds.models import WORLD_CHAT_TEMPLATE, world_model, world_tokenizer
from tests.engine.tiny import plain_logps
from tests.smopd.recipes import TINY

PIECES = ["a", "ab", "b", "c", "d", "<think>", "</think>", "+"]
A = [7, 3]
"""A response `a`, with its end token."""
SAMPLING = Sampling(max_new_tokens=6)


def settings_of(**rollout: Any) -> Settings:
    given = {"environment": "talkers:Fails", "max_new_tokens": 6, "turns": 3, **rollout}
    return Settings.model_validate({**TINY, "rollout": given})


class Scripted:
    """Answers the n-th message of each conversation with the n-th of `answers`."""

    def __init__(self, *answers: Answer):
        self.answers, self.heard = list(answers), []

    def ask(self, items, *, begin=False):
        if begin:
            return [Answer()] * len(items)
        self.heard += items.values()
        return [self.answers.pop(0)] * len(items) if items else []

    def end(self):
        """As a worker."""


class Speaks:
    """An engine that samples the given token ids, turn by turn, and keeps what it read."""

    def __init__(self, *turns: list[int], finished: bool = True):
        self.turns, self.finished, self.read = list(turns), finished, []

    def generate(self, prompts, groups, sampling):
        if not prompts:
            return []
        self.read += prompts
        ids = torch.tensor(self.turns.pop(0))
        own, pairs = (self.finished, 5 - len(self.turns)), zip(prompts, groups, strict=True)
        return [Rollout(tuple(prompt), ids, -torch.ones(len(ids)), group, *own) for prompt, group in pairs]


def said(text: str) -> Answer:
    return Answer([{"role": "user", "content": text}])


def talk(engine, environment, template: str = WORLD_CHAT_TEMPLATE, **rollout: Any):
    """Return the conversation about the prompt `c`, and the tokenizer."""
    tokenizer = world_tokenizer(PIECES)
    tokenizer.chat_template = template
    ids = tuple(tokenizer("<|user|>c<|assistant|>", add_special_tokens=False)["input_ids"])
    conversations = Conversations(environment, tokenizer, settings_of(**rollout))
    (found,) = conversations.generate(engine, [Prompt(0, "c", ids, {})], [4], SAMPLING)
    return found, tokenizer


def test_sampled_tokens_are_kept_and_the_environments_are_masked():
    """`a`, `b` would be one token `ab` if the conversation were tokenized again."""
    tokenizer = world_tokenizer(PIECES)
    a, b, d, end = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "d", "<eos>"))
    engine, environment = Speaks([a, b, end], [d, end]), Scripted(said("c+c"), Answer())
    found, tokenizer = talk(engine, environment)
    assert tokenizer.decode(found.response_ids) == "ab<eos><|user|>c+c<|assistant|>d<eos>"
    assert found.response_ids[:3].tolist() == [a, b, end]
    assert found.loss_mask.tolist() == [True] * 3 + [False] * 5 + [True] * 2
    assert found.of_policy(found.logps).tolist() == [-1.0] * 5 and found.logps.sum() == -5
    assert engine.read[1] == [*found.prompt_ids, *found.response_ids[:8].tolist()]
    assert (found.finished, found.ended, found.group, found.drift) == (True, "environment", 4, False)
    assert found.policy_version == 4, "that of the oldest response"
    assert [message["content"] for message in found.messages] == ["ab", "c+c", "d"]
    assert [message["content"] for message in environment.heard] == ["ab", "d"]


@pytest.mark.parametrize(
    ("answers", "options", "finished", "ended", "tokens"),
    [
        ([Answer()], {}, True, "environment", 2),
        ([said("c")], {}, False, "response", 2),
        ([said("c"), said("c")], {"turns": 2}, True, "turns", 7),
        ([said("c")], {"conversation_tokens": 10}, True, "tokens", 2),
        ([said("c+" * 100_000)], {}, True, "tokens", 2),
        ([Answer(failure="exception", error="E")], {}, True, "exception", 2),
    ],
)
def test_endings(answers, options, finished, ended, tokens):
    """With 10 tokens, the answer's three leave less than a response's six."""
    engine = Speaks(A, A, finished=finished)
    found, _ = talk(engine, Scripted(*answers), **options)
    assert (found.ended, len(found.response_ids)) == (ended, tokens)
    assert found.finished is (ended == "environment") and bool(found.loss_mask[-1])
    assert len(found.messages) == (3 if ended == "turns" else 1)


def test_a_long_response_hides_no_environment_that_could_not_begin():
    environment = Scripted()
    environment.ask = lambda items, *, begin=False: [Answer(failure="exception")] * len(items)
    found, _ = talk(Speaks(A, finished=False), environment)
    assert (found.ended, found.finished) == ("exception", False)


FORGETS = WORLD_CHAT_TEMPLATE.replace("message['content'] }}", "message['content'].split('</think>')[-1] }}")


def test_a_template_that_forgets_thoughts_is_found_and_the_tokens_stay(caplog):
    tokenizer = world_tokenizer(PIECES)
    ids = tokenizer("<think>a</think>b<eos>", add_special_tokens=False)["input_ids"]
    own = f"{{{{ 'the ANSWER' }}}}{FORGETS}"  # text of the template does not count as a response
    for template, drift in ((FORGETS, True), (own, True), (WORLD_CHAT_TEMPLATE, False)):
        found, _ = talk(Speaks(ids, A), Scripted(said("c"), Answer()), template)
        shown = "<think>a</think>b<eos><|user|>c<|assistant|>a<eos>"
        assert (tokenizer.decode(found.response_ids), found.drift) == (shown, drift)
        assert ("in 1 of 1 conversations the chat template" in caplog.text) is drift
        caplog.clear()


class Counts:
    """Answers each message by its length, twice."""

    def ask(self, items, *, begin=False):
        if begin:
            self.turns = dict.fromkeys(items, 0)
            return [Answer()] * len(items)
        found = []
        for i, message in items.items():
            self.turns[i] += 1
            found.append(said("c" * (1 + len(message["content"]) % 3)) if self.turns[i] < 3 else Answer())
        return found


def test_draws_depend_on_group_sample_and_turn_alone():
    model, tokenizer = world_model(0, pieces=PIECES)
    ends = [i for i in range(len(tokenizer)) if i % 3 == 0]
    conversations = Conversations(Counts(), tokenizer, settings_of())  # type: ignore[arg-type]
    prompts = [Prompt(i, "c", (5, 10 + i % 2, 6), {}) for i in range(4)]
    sampling = replace(SAMPLING, n=3, seed=2)
    engine, keys = LocalRollout(model, ends), []
    plain = engine.generate
    engine.generate = lambda asked, groups, how: keys.extend(groups) or plain(asked, groups, how)
    together = conversations.generate(engine, prompts, range(4), sampling)
    assert len(set(keys)) == len(keys) > 12, "each response has draws of its own"
    alone = []
    for group in reversed(range(4)):
        made = conversations.generate(LocalRollout(model, ends), [prompts[group]], [group], sampling)
        alone = made + alone
    ids = [tuple(each.response_ids.tolist()) for each in together]
    assert ids == [tuple(each.response_ids.tolist()) for each in alone] and len(set(ids)) > 6
    assert {each.group for each in together} == set(range(4))
    assert max(len(each.messages) for each in together) > 3, "no conversation has three turns"
    logp_N = torch.cat([each.of_policy(each.logps) for each in together])
    torch.testing.assert_close(logp_N, plain_logps(model, together).detach(), rtol=0, atol=1e-4)


TALKERS = """
import asyncio, os, time

class Fails:
    def begin(self, row):
        return [1 / (row["prompt"] != "cannot begin"), row["prompt"]]

    def answer(self, state, message):
        state.append(message["content"])
        if state[1].startswith("hangs"):
            time.sleep(600)
        if state[1] == "gives up":
            raise TimeoutError("the database did not answer")
        if state[1] == "exits":
            raise SystemExit(3)
        if state[1] == "dies":
            os._exit(3)
        text = "x" * (2 << 20) if state[1] == "floods" else str(len(state))
        shown = [{"role": "user", "content": text}] if len(state) < 4 else None
        return {"mumbles": "hello", "is silent": []}.get(state[1], shown)

class Waits:
    async def begin(self, row):
        return row["prompt"]

    async def answer(self, state, message):
        await asyncio.sleep(600 if state == "hangs" else 0.01)
        if state == "gives up":
            raise asyncio.TimeoutError("the database did not answer")
        return [{"role": "user", "content": "3"}]

class Leaves:
    def __init__(self, file):
        self.file = file

    def begin(self, row):
        return row["prompt"]

    def answer(self, state, message):
        return None

    def end(self, state):
        if state.startswith("hangs"):
            time.sleep(600)
        with open(self.file, "a") as ended:
            ended.write(state + " ")

def spoken(completions, **columns):
    return [float(len(messages)) for messages in completions]

def shown(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Environments]:
    (tmp_path / "talkers.py").write_text(TALKERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Environments() as found:
        yield found


def begun(worker, *names: str) -> list[str]:
    return [each.failure for each in worker.ask({i: {"prompt": n} for i, n in enumerate(names)}, begin=True)]


def replies(worker, *names: str) -> dict[str, str | None]:
    """Return the first message to each conversation, why there is none, or None at its end."""
    answers = worker.ask({i: {"role": "assistant", "content": "hi"} for i in range(len(names))})
    shown = [each.failure or (each.messages and each.messages[0]["content"]) for each in answers]
    return dict(zip(names, shown, strict=True))


def test_a_conversation_that_fails_leaves_the_others(environments):
    """Nor do answers that hang take the threads or the time of others, in their turn or the next."""
    with pytest.raises(UnicodeEncodeError):  # half a character
        checked([{"role": "user", "content": "\ud800"}])
    worker = environments.of(settings_of(environment_seconds=1.0))
    hang = [f"hangs {i}" for i in range(ENVIRONMENT_THREADS)]
    names = ["cannot begin", *hang, "fine", "exits", "floods", "mumbles", "is silent"]
    assert begun(worker, *names) == ["exception", *[""] * (len(names) - 1)]
    expected = dict.fromkeys(names, "exception") | dict.fromkeys(hang, "timeout")
    assert replies(worker, *names) == expected | {"fine": "3"}
    begun(worker, "fine")
    assert replies(worker, "fine") == {"fine": "3"}
    assert replies(worker, "fine") == {"fine": None}
    begun(worker, "fine", "dies")
    assert replies(worker, "fine", "dies") == dict.fromkeys(["fine", "dies"], "worker_died")
    begun(worker, "fine")
    assert replies(worker, "fine") == {"fine": "3"}, "in a new process"


@pytest.mark.parametrize("name", ["Fails", "Waits"])
def test_a_timeout_that_an_environment_raises_is_its_own_error(environments, caplog, name):
    worker = environments.of(settings_of(environment=f"talkers:{name}"))
    begun(worker, "gives up")
    assert replies(worker, "gives up") == {"gives up": "exception"}
    assert "TimeoutError: the database did not answer" in caplog.text


class Asks:
    """Begins with one of the row's questions."""

    def __init__(self):
        self.ended = []

    def begin(self, row):
        return row["questions"].pop()

    def end(self, state):
        self.ended.append(state)


def test_conversations_about_one_prompt_share_no_value_and_end_before_the_next_batch():
    host, loop, questions = EnvironmentHost(f"{__name__}:Asks", {}, 60.0), asyncio.new_event_loop(), ["2+2?"]
    host.reply(loop, True, {i: {"questions": questions} for i in range(3)})
    assert host.states == dict.fromkeys(range(3), "2+2?") and host.environment.ended == []
    host.reply(loop, True, {0: {"questions": ["3+3?"]}})
    loop.close()
    assert host.environment.ended == ["2+2?"] * 3 and host.states == {0: "3+3?"}


def test_the_last_conversations_end_with_the_run_and_a_late_end_delays_nobody(tmp_path, environments):
    settings = settings_of(
        environment="talkers:Leaves",
        environment_seconds=1.0,
        environment_kwargs={"file": str(tmp_path / "ended")},
    )
    with Environments() as own:
        worker = own.of(settings)
        hang = [f"hangs {i}" for i in range(ENVIRONMENT_THREADS + 1)]
        assert set(begun(worker, "first", *hang)) == {""}
        assert begun(worker, "last", "least") == ["", ""]
    assert sorted((tmp_path / "ended").read_text().split()) == ["first", "last", "least"]


def test_async_environments_and_ones_that_cannot_be_loaded(environments):
    worker = environments.of(settings_of(environment="talkers:Waits", environment_seconds=1.0))
    names = ["hangs", *map(str, range(50))]
    begun(worker, *names)
    assert replies(worker, *names) == dict.fromkeys(names, "3") | {"hangs": "timeout"}
    with pytest.raises(RewardError, match=r"rollout.environment: cannot load 'talkers:Nobody'"):
        environments.of(settings_of(environment="talkers:Nobody"))


def test_rewards_see_the_conversation_and_none_whose_environment_failed(environments):
    pairs = [talk(Speaks(A, A), Scripted(said("c"), last)) for last in (Answer(), Answer(failure="timeout"))]
    talks, (tokenizer, _) = zip(*pairs, strict=True)
    with RewardPool([Reward(name=name, function=f"talkers:{name}") for name in ("spoken", "shown")]) as pool:
        rewarder = Rewarder(pool, tokenizer, settings_of().scoring)
        scored = rewarder.score([Prompt(0, "c", (), {})] * 2, talks)
    assert scored.rewards_RK[0].tolist() == [3, len("a<eos><|user|>c<|assistant|>a")]
    assert scored.rewards_RK[1].isnan().all()
    assert [kinds["environment"] for kinds in scored.failures.values()] == [1, 1]
