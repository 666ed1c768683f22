"""Preference models, local or on a server: sequence classifiers with one output, which score token ids.

The score is the head's raw output at the last token, in fp32. transformers' own forward would skip an end
token that is also the pad token. Shapes: B sequences, T positions, D hidden.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from smopd.engine.models.loading import UnusableModel, load_errors, place_of, stored_dtype
from smopd.engine.remote.servers import Request, Servers, ServerUnavailable

# The head's name in safe-rlhf and align-anything, which trained Beaver and the paper's preference models.
HEAD_NAMES = {r"^score_head\.": "score."}

TokenIds = Sequence[int]
PROBE: list[TokenIds] = [[1], [2, 3], [4, 5, 6]]
SAME_SCORE = 0.05  # ours: relative and absolute tolerance; bf16 has steps of 0.4%


class LocalPreferenceModel:
    """A preference model in transformers. It computes in its stored dtype on a GPU, in fp32 on the CPU.

    device: None means the GPU of LOCAL_RANK if there is one, else the CPU. Raise FileNotFoundError if the
    model does not exist, and UnusableModel if it lacks a trained head with one output.
    """

    def __init__(self, path: str | Path, device: torch.device | str | None = None):
        if device is None and torch.cuda.is_available():
            device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
        self.device = torch.device(device or "cpu")
        stored = stored_dtype(path)
        model, self._head = _load(path, torch.float32 if self.device.type == "cpu" else stored)
        self._decoder: nn.Module = getattr(model, model.base_model_prefix).to(self.device)
        self._head = self._head.to(self.device, torch.float32)
        self.max_tokens = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0)) or 2**31

    @torch.inference_mode()
    def score(self, sequences: Sequence[TokenIds], batch_tokens: int) -> list[float]:
        """Return the raw scores, computed in padded batches. A sequence has 1 to `max_tokens` ids."""
        return by_batches(sequences, batch_tokens, lambda batches: [self._batch(batch) for batch in batches])

    def _batch(self, sequences: Sequence[TokenIds]) -> list[float]:
        ids_BT = pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)
        lengths_B = torch.tensor([len(sequence) for sequence in sequences])
        real_BT = (torch.arange(ids_BT.shape[1]) < lengths_B[:, None]).long()  # 0 at padding
        states_BTD = self._decoder(
            input_ids=ids_BT.to(self.device), attention_mask=real_BT.to(self.device), use_cache=False
        ).last_hidden_state
        states_BD = states_BTD[torch.arange(len(sequences)), lengths_B - 1].float()
        return F.linear(states_BD, self._head.weight, self._head.bias)[:, 0].tolist()


class RemotePreferenceModel:
    """Like `LocalPreferenceModel`, but on servers started with `vllm serve MODEL --runner pooling`."""

    def __init__(self, urls: Sequence[str]):
        self._servers = Servers(urls)
        self._names: dict[str, str] = {}
        self._probed: list[float] = []
        self.max_tokens = 2**31
        self._admit(self._servers.urls)
        if not self._names:
            raise self._servers.none_left()

    def score(self, sequences: Sequence[TokenIds], batch_tokens: int) -> list[float]:
        self._admit(self._servers.restore())
        return by_batches(
            sequences, batch_tokens, lambda batches: self._servers.map(self._request, batches, _scores)
        )

    def _request(self, url: str, batch: Sequence[TokenIds]) -> Request:
        body = {"model": self._names[url], "input": [list(ids) for ids in batch]}
        return Request("/classify", json=body | {"use_activation": False, "add_special_tokens": False})

    def _admit(self, urls: Sequence[str]) -> None:
        """Remove servers that do not answer, or whose scores of PROBE differ from the first server's."""
        for url in urls:
            try:
                name, length = self._servers.ask(url, Request("/v1/models"), _name_and_length)
                self._names[url] = name
                probe = self._request(url, PROBE)
                found = self._servers.ask(url, probe, lambda answer: _scores("", PROBE, answer))
                self._probed = self._probed or found
                pairs = zip(found, self._probed, strict=True)
                if any(abs(a - b) > SAME_SCORE * (1 + abs(b)) for a, b in pairs):
                    raise ServerUnavailable(f"scores a probe {found}, the first server {self._probed}")
                self.max_tokens = min(self.max_tokens, length)
            except ServerUnavailable as error:
                self._names.pop(url, None)
                self._servers.remove(url, str(error))


def by_batches(
    sequences: Sequence[TokenIds],
    batch_tokens: int,
    score: Callable[[list[list[TokenIds]]], list[list[float]]],
) -> list[float]:
    """Score the sequences in batches of similar length, and return the scores in order.

    Equal sequences are scored only once. In batches of different shapes, their scores would differ by
    rounding, and a group of equal responses would have nonzero advantages.
    """
    keys = [tuple(sequence) for sequence in sequences]
    if not all(keys):
        raise ValueError("score: a sequence is empty, expected a token to score at")
    longest_first = sorted(set(keys), key=lambda ids: (-len(ids), ids))
    batches: list[list[TokenIds]] = []
    for ids in longest_first:
        if not batches or (len(batches[-1]) + 1) * len(batches[-1][0]) > batch_tokens:
            batches.append([])
        batches[-1].append(ids)
    scored = [value for batch in score(batches) for value in batch] if batches else []
    values = dict(zip(longest_first, scored, strict=True))
    return [values[key] for key in keys]


def _load(path: str | Path, dtype: torch.dtype) -> tuple[PreTrainedModel, nn.Linear]:
    """Load the model at `path`, which must have a config, and return it with its head."""
    with load_errors(path):
        found: Any = AutoModelForSequenceClassification.from_pretrained(
            place_of(path),
            num_labels=1,  # missing in the config of some models
            dtype=dtype,
            trust_remote_code=False,
            key_mapping=HEAD_NAMES,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model, report = found
    sizes = report["mismatched_keys"]
    mistakes = [f"{key} has shape {tuple(stored)}, expected {tuple(ours)}" for key, stored, ours in sizes]
    if not isinstance(getattr(model, "score", None), nn.Linear):
        mistakes.append("has no linear head `score` over single tokens")
    mistakes += [f"its files lack {key}" for key in sorted(report["missing_keys"])]
    extra = sorted(key for key in report["unexpected_keys"] if key.startswith("score"))
    mistakes += [f"its head does not use {key}" for key in extra]
    if mistakes:
        kind = type(model).__name__
        raise UnusableModel(f"model {path}: is not a {kind} trained with one output: {mistakes[0]}")
    return model.eval().requires_grad_(False), model.score


def _name_and_length(answer: httpx.Response) -> tuple[str, int]:
    card = answer.json()["data"][0]
    return str(card["id"]), int(card["max_model_len"])


def _scores(url: str, batch: Sequence[TokenIds], answer: httpx.Response) -> list[float]:
    """Read the scores in an answer of /classify."""
    outputs = [row["probs"] for row in sorted(answer.json()["data"], key=lambda row: row["index"])]
    values_B = torch.tensor(outputs, dtype=torch.float32)
    if values_B.shape != (len(batch), 1) or not bool(values_B.isfinite().all()):
        raise ValueError(f"got scores {str(outputs)[:80]}, expected a finite number for each of {len(batch)}")
    return values_B[:, 0].tolist()
