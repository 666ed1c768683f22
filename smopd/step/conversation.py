"""Conversations of the policy with an environment, as rollouts.

All conversations of a rank advance together. In each turn, the engine samples a response in every
conversation, and then the environment answers them all. Sampled tokens are kept as they are. Only the text
between two responses is tokenized: the answer and the next generation prompt, in the chat template's form.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from smopd.config.settings import Settings
from smopd.data.chat import (
    Content,
    Message,
    read_tools,
    render,
    response_start,
    response_texts,
    template_options,
)
from smopd.data.prompts import CHARS_PER_TOKEN, Prompt
from smopd.engine.protocols import RolloutEngine
from smopd.engine.types import Rollout, Sampling, draw_key
from smopd.names import ENVIRONMENT_THREADS
from smopd.rewards.environments import Answer
from smopd.rewards.pool import CallFailed, RewardError, Worker

log = logging.getLogger(__name__)
GRACE_SECONDS = 5.0  # ours: time for the environment's process to report late answers
NEUTRAL = "smopd-neutral-response"
"""Text that replaces a sampled response, because templates may render an earlier response differently."""


class EnvironmentWorker(Worker):
    """The worker of one environment. If the worker fails in a call, every conversation in the call fails."""

    host = "environment"

    def ask(self, items: Mapping[int, Any], *, begin: bool = False) -> list[Answer]:
        """Answer each message. If `begin`, drop all conversations instead, and begin one about each row."""
        if not items and not begin:
            return []
        try:
            self.start()
            frame = pickle.dumps((begin, dict(items)), 5)
            rounds = math.ceil(len(items) / ENVIRONMENT_THREADS) + begin  # another one to end the last batch
            seconds = rounds * self.deadline_seconds + GRACE_SECONDS
            answers = self._call(frame, seconds, lambda answer: Answer(**answer))
            if len(answers) != len(items):
                raise CallFailed("worker_died", "the worker's reply has a wrong number of answers")
        except CallFailed as failed:
            answers = [Answer(failure=failed.kind, error=str(failed))] * len(items)
        self.limit_log()
        if error := next((each.error for each in answers if each.failure), None):
            log.warning("%s: %s", self.name, error)
        return answers


class Environments(AbstractContextManager["Environments"]):
    """Context manager of this rank's environments: one worker per environment and set of arguments."""

    def __init__(self, log_path: Path | None = None, memory_bytes: int = 0):
        self.own: dict[str, Any] = {"log_path": log_path, "memory_bytes": memory_bytes}
        self._workers: dict[str, EnvironmentWorker] = {}

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers.values():
            if exception == (None, None, None):
                worker.ask({}, begin=True)  # ends the last conversations
            worker.close()
            worker.end()

    def of(self, settings: Settings) -> EnvironmentWorker | None:
        """Return the running worker, or None without an environment. Raise RewardError if it cannot start."""
        path, seconds = settings.rollout.environment, settings.rollout.environment_seconds
        if path is None:
            return None
        given = (settings.rollout.environment_kwargs, seconds)
        worker = EnvironmentWorker("rollout.environment", path, given, seconds, **self.own)
        worker = self._workers.setdefault(repr((path, given)), worker)
        worker.start()
        return worker


@dataclass
class Transcript:
    """A conversation in progress. `sample` is its number among the conversations about the prompt."""

    prompt: Prompt
    group: int
    sample: int
    text: str
    """The text that the policy has read and written, including the prompt."""
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: str = ""
    drift: bool = False

    def add(self, text: str, ids: Sequence[int], logps: Sequence[float], *, policy: bool) -> None:
        self.text += text
        self.ids += ids
        self.logps += logps
        self.mask += [policy] * len(ids)

    def rollout(self) -> Rollout:
        return Rollout(
            self.prompt.token_ids,
            torch.tensor(self.ids, dtype=torch.int64),
            torch.tensor(self.logps),
            self.group,
            finished=self.ended == "environment",
            policy_version=min(self.versions),
            loss_mask=torch.tensor(self.mask),
            messages=tuple(self.messages),
            ended=self.ended,
            drift=self.drift,
        )


@dataclass(frozen=True)
class Conversations:
    """Sampler of conversations. A draw depends only on (seed, group, sample, turn, position)."""

    environment: EnvironmentWorker
    tokenizer: PreTrainedTokenizerBase
    settings: Settings

    @classmethod
    def of(
        cls, environments: Environments, tokenizer: PreTrainedTokenizerBase, settings: Settings
    ) -> Conversations | None:
        """Return the sampler, or None if the settings have no environment."""
        worker = environments.of(settings)
        if worker is not None and not tokenizer.chat_template:
            raise RewardError("rollout.environment: the tokenizer has no chat template, which turns need")
        return None if worker is None else cls(worker, tokenizer, settings)

    def generate(
        self, engine: RolloutEngine, prompts: Sequence[Prompt], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        """Return `sampling.n` conversations about each prompt, in the order of `RolloutEngine.generate`."""
        transcripts = [
            Transcript(prompt, group, number, self._render(prompt, prompt.content))
            for prompt, group in zip(prompts, groups, strict=True)
            for number in range(sampling.n)
        ]
        rows = {
            i: {**transcript.prompt.columns, "prompt": transcript.prompt.content}
            for i, transcript in enumerate(transcripts)
        }
        for transcript, answer in zip(transcripts, self.environment.ask(rows, begin=True), strict=True):
            transcript.ended = answer.failure
        made = engine.generate([prompt.token_ids for prompt in prompts], groups, sampling)
        live = dict(enumerate(transcripts))
        for turn in range(1, self.settings.rollout.turns + 1):
            for transcript, response in zip(live.values(), made, strict=True):
                self._add_response(transcript, response)
            live = {i: transcript for i, transcript in live.items() if not transcript.ended}
            answers = self.environment.ask({i: transcript.messages[-1] for i, transcript in live.items()})
            for transcript, answer in zip(live.values(), answers, strict=True):
                self._add_answer(transcript, answer, last=turn == self.settings.rollout.turns)
            live = {i: transcript for i, transcript in live.items() if not transcript.ended}
            # Ranks that share an engine must call it equally often, even if they have nothing to sample.
            made = engine.generate(
                [[*transcript.prompt.token_ids, *transcript.ids] for transcript in live.values()],
                [draw_key(transcript.group, transcript.sample, turn) for transcript in live.values()],
                replace(sampling, n=1),
            )
        if any(transcript.ended == "timeout" for transcript in transcripts):
            self.environment.end()  # ends calls that still run after their timeout
        if drifted := sum(transcript.drift for transcript in transcripts):
            log.warning(
                "rollout.environment: in %d of %d conversations the chat template prints earlier turns "
                "differently from what was sampled, which is kept",
                drifted, len(transcripts),
            )  # fmt: skip
        return [transcript.rollout() for transcript in transcripts]

    def _add_response(self, transcript: Transcript, response: Rollout) -> None:
        special_tokens = self.settings.scoring.special_tokens
        (text,) = response_texts(self.tokenizer, [response], special_tokens=special_tokens)
        start = transcript.prompt.response_start
        if transcript.messages:  # only the first response can continue the prompt's last message
            start = response_start(self.tokenizer, "", self._options(transcript.prompt))
        transcript.messages.append({"role": "assistant", "content": start + text})
        transcript.versions.append(response.policy_version)
        ids = response.response_ids.tolist()
        transcript.add(self.tokenizer.decode(ids), ids, response.logps.tolist(), policy=True)
        if not response.finished:
            transcript.ended = transcript.ended or "response"

    def _add_answer(self, transcript: Transcript, answer: Answer, *, last: bool) -> None:
        """Add an answer of the environment, or end the conversation."""
        options = self.settings.rollout
        if answer.failure or answer.messages is None:
            transcript.ended = answer.failure or "environment"
            return
        room = options.longest_response - len(transcript.ids) - options.max_new_tokens
        if sum(len(message["content"]) for message in answer.messages) > CHARS_PER_TOKEN * room:
            transcript.ended = "tokens"
        elif last:
            transcript.ended = "turns"
        else:
            text, drift = self._between(transcript, answer.messages)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) > room:
                transcript.ended = "tokens"
                return
            transcript.messages += answer.messages
            transcript.add(text, ids, [0.0] * len(ids), policy=False)
            transcript.drift |= drift

    def _between(self, transcript: Transcript, answers: Sequence[Message]) -> tuple[str, bool]:
        """Return the text between responses, and whether the template renders earlier text differently."""
        content = transcript.prompt.content
        chat = ({"role": "user", "content": content},) if isinstance(content, str) else content
        if chat[-1]["role"] == "assistant":  # the first response begins with this message
            chat = chat[:-1]
        whole = self._render(transcript.prompt, (*chat, *transcript.messages, *answers))
        if whole.startswith(transcript.text):
            return whole[len(transcript.text) :], False
        chat = ({"role": "user", "content": "?"}, {"role": "assistant", "content": NEUTRAL})
        _, found, after = self._render(transcript.prompt, (*chat, *answers)).partition(NEUTRAL)
        if not found:
            raise RewardError("rollout.environment: the chat template leaves out the assistant's messages")
        return after.removeprefix(self.tokenizer.decode(transcript.ids[-1:])), True

    def _render(self, prompt: Prompt, content: Content) -> str:
        tools = read_tools(prompt.columns.get("tools"))
        try:
            return render(self.tokenizer, content, tools, self._options(prompt))
        except ValueError as error:
            raise RewardError(f"rollout.environment: {error}") from error

    def _options(self, prompt: Prompt) -> dict[str, Any]:
        return template_options(self.settings.data.chat_template_kwargs, prompt.columns)


def sample(
    engine: RolloutEngine,
    conversations: Conversations | None,
    prompts: Sequence[Prompt],
    groups: Sequence[int],
    sampling: Sampling,
) -> list[Rollout]:
    """Return `sampling.n` responses to each prompt, or conversations about it."""
    if conversations is not None:
        return conversations.generate(engine, prompts, groups, sampling)
    return engine.generate([prompt.token_ids for prompt in prompts], groups, sampling)
