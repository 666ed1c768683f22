"""Preference models: sequence classifiers with one output that score token ids, here or behind a server.

The score is the head's raw value at a sequence's last token. The head is applied here, in fp32: transformers'
own forward reads the last token that is not the pad token, which is an earlier one where a chat ends with an
end token that pads too. Shapes: B sequences, T positions, D hidden.
"""

from __future__ import annotations

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

from smopd.engine.models.loading import UnusableModel, load_errors, stored_dtype
from smopd.engine.remote.servers import Request, RetryPolicy, Servers

# Of safe-rlhf and align-anything, which trained Beaver and the paper's pair: there the head is called so.
HEAD_NAMES = {r"^score_head\.": "score."}

TokenIds = Sequence[int]


class LocalPreferenceModel:
    """A preference model in transformers.

    Args:
        path: a folder or hub id.
        device: None is the GPU of this process's LOCAL_RANK where there is one, otherwise the CPU. Weights
            have the stored dtype on a GPU and float32 on the CPU; the head is fp32.
    Attributes:
        max_tokens: the longest sequence that it takes.
    Raises:
        FileNotFoundError, UnusableModel: as `engine.models.load_model`; or it has no trained head of one
            output that reads single tokens.
    """

    def __init__(self, path: str | Path, device: torch.device | str | None = None):
        self.device = torch.device(device) if device is not None else default_device()
        stored = stored_dtype(path)
        model, self._head = _load(path, torch.float32 if self.device.type == "cpu" else stored)
        self._decoder: nn.Module = getattr(model, model.base_model_prefix).to(self.device)
        self._head = self._head.to(self.device, torch.float32)
        self.max_tokens = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0)) or 2**31

    @torch.inference_mode()
    def score(self, sequences: Sequence[TokenIds], batch_tokens: int) -> list[float]:
        """The raw score of each sequence as an fp32 number, in order; equal sequences have equal scores.

        Args:
            sequences: of 1 to `max_tokens` ids.
            batch_tokens: most tokens scored at once, padding counted; a longer sequence goes alone.
        """
        return by_batches(sequences, batch_tokens, lambda batches: [self._batch(batch) for batch in batches])

    def _batch(self, sequences: Sequence[TokenIds]) -> list[float]:
        ids_BT = pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)
        lengths_B = torch.tensor([len(sequence) for sequence in sequences])
        real_BT = (torch.arange(ids_BT.shape[1]) < lengths_B[:, None]).long()  # the padding may be any id
        states_BTD = self._decoder(
            input_ids=ids_BT.to(self.device), attention_mask=real_BT.to(self.device), use_cache=False
        ).last_hidden_state
        states_BD = states_BTD[torch.arange(len(sequences)), lengths_B - 1].float()
        return F.linear(states_BD, self._head.weight, self._head.bias)[:, 0].tolist()


class RemotePreferenceModel:
    """As `LocalPreferenceModel`, at `vllm serve MODEL --runner pooling` at one or more URLs.

    Ids are sent, so that chat template, truncation and special tokens are ours; the activation that vLLM
    would put over the score is turned off.

    Args:
        urls: servers of the same model.
    Raises:
        NoServer: none answers as a model server does.
    """

    def __init__(self, urls: Sequence[str], retry: RetryPolicy | None = None):
        self._servers = Servers(urls, retry)
        cards = self._servers.each(Request("/v1/models"), _name_and_length)
        self._names = {url: name for url, (name, _) in cards.items()}
        self.max_tokens = min(length for _, length in cards.values())

    def score(self, sequences: Sequence[TokenIds], batch_tokens: int) -> list[float]:
        self._servers.restore()
        return by_batches(sequences, batch_tokens, self._batches)

    def _batches(self, batches: Sequence[Sequence[TokenIds]]) -> list[list[float]]:
        first = next(iter(self._names.values()))  # of servers that have come up since

        def request(url: str, batch: Sequence[TokenIds]) -> Request:
            body = {"model": self._names.get(url, first), "input": [list(ids) for ids in batch]}
            return Request("/classify", json=body | {"use_activation": False, "add_special_tokens": False})

        return self._servers.map(request, batches, _scores)


def by_batches(
    sequences: Sequence[TokenIds],
    batch_tokens: int,
    score: Callable[[list[list[TokenIds]]], list[list[float]]],
) -> list[float]:
    """The scores of sequences in order, from a function that scores batches of about equal lengths.

    Equal sequences are scored once: in batches of different shape they would differ by rounding, and a group
    of equal rewards would no longer be one.
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


def default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _load(path: str | Path, dtype: torch.dtype) -> tuple[PreTrainedModel, nn.Linear]:
    """The model and its head. `stored_dtype` has found a config at `path`."""
    with load_errors(path):
        found: Any = AutoModelForSequenceClassification.from_pretrained(
            str(Path(path).expanduser()) if str(path).startswith("~") else str(path),
            num_labels=1,  # some of these models' configs do not say it; the weights do
            dtype=dtype,
            key_mapping=HEAD_NAMES,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model, report = found
    kind = type(model).__name__
    mistakes = []
    for key, stored, ours in report["mismatched_keys"]:
        outputs = "a preference model has one output: " if key.startswith("score.") else ""
        mistakes.append(f"{outputs}{key} has shape {tuple(stored)}, expected {tuple(ours)} in a {kind}")
    if not isinstance(getattr(model, "score", None), nn.Linear):
        mistakes.append(f"a {kind} has no linear head `score` over single tokens, expected a decoder's one")
    if missing := sorted(report["missing_keys"]):
        untrained = "; it was not trained as a preference model" if missing == ["score.weight"] else ""
        mistakes.append(f"its files lack {', '.join(missing[:3])} of a {kind}{untrained}")
    if extra := sorted(key for key in report["unexpected_keys"] if key.startswith("score")):
        mistakes.append(f"has {', '.join(extra)}, which a {kind}'s head does not use")
    if mistakes:
        raise UnusableModel(f"model {path}: {mistakes[0]}")
    return model.eval().requires_grad_(False), model.score


def _name_and_length(answer: httpx.Response) -> tuple[str, int]:
    card = answer.json()["data"][0]
    return str(card["id"]), int(card["max_model_len"])


def _scores(url: str, answer: httpx.Response, batch: Sequence[TokenIds]) -> list[float]:
    """The scores of one answer of /classify, rounded to fp32."""
    outputs = [row["probs"] for row in sorted(answer.json()["data"], key=lambda row: row["index"])]
    values_B = torch.tensor(outputs, dtype=torch.float32)
    if values_B.shape != (len(batch), 1) or not bool(values_B.isfinite().all()):
        raise ValueError(
            f"got scores {str(outputs)[:80]}, expected one finite number for each of {len(batch)}"
        )
    return values_B[:, 0].tolist()
