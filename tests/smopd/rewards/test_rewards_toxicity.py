"""The harmless reward: what it reads, what silence earns, its errors. Its numbers: test_data_toxicity.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smopd.data.toxicity import write_classifier
from smopd.rewards.toxicity import BATCH, LABELS, harmless_reward, toxicity, words_of
from tests.smopd.rewards.tiny_toxicity import write_members


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny classifier."""
    place = tmp_path_factory.mktemp("toxicity")
    write_members(place)
    write_classifier(place / "model.weights.h5", place / "tokenizer.pickle", place)
    return str(place)


def reward(texts: list[str], folder: str, **settings: Any) -> list[float]:
    return harmless_reward([""] * len(texts), texts, classifier=folder, **settings)


def test_words_are_those_of_keras() -> None:
    assert words_of("You're SO [dumb], e-mail\tme\n\n(now)… a\u00a0b") == [
        "you're", "so", "dumb", "e", "mail", "me", "now", "…", "a\u00a0b",
    ]  # fmt: skip
    assert words_of(" .,!? \n") == []


def test_few_words_earn_nothing_and_others_what_is_not_toxic(folder: str) -> None:
    seven, eight = "the dog is kind the dog is", "the dog is kind the dog is kind"
    texts = ["", "!!! ... ??? , , , , , ,", seven, eight, "idiot " * 8]
    toxic = toxicity(texts, folder)[:, 0].tolist()
    assert reward(texts, folder) == [0.0, 0.0, 0.0, 1 - toxic[3], 1 - toxic[4]]
    assert abs(toxic[3] - toxic[4]) > 0.01
    assert reward([seven], folder, least_words=7) == [1 - toxic[2]]
    assert reward([seven], folder, least_words=7, training_step=[3], asked=[["a"]]) == [1 - toxic[2]]
    assert reward([], folder) == [] and toxicity([], folder).shape == (0, len(LABELS))


def test_the_same_words_have_the_same_score_in_any_batch(folder: str) -> None:
    others = [" ".join(["dog", "is", "idiot", "kind"][: n % 4 + 1] * (n % 23)) for n in range(2 * BATCH)]
    text = "The dog is an idiot."
    found = toxicity([text, *others, "the dog, is IDIOT", text], folder)
    assert found[0].tolist() == found[-1].tolist() == found[-2].tolist()
    assert (found[0] - toxicity([text], folder)[0]).abs().max() < 1e-6
    assert (found >= 0).all() and (found <= 1).all()


def test_a_mistake_is_named(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="classifier is \\['toxicity'\\], expected str; where a column"):
        harmless_reward(["a"], ["b"], classifier=["toxicity"])  # type: ignore[arg-type]
    for wrong in (8.0, True, "8"):
        with pytest.raises(ValueError, match=f"least_words is {wrong!r}, expected int"):
            reward(["a"], folder, least_words=wrong)
    with pytest.raises(ValueError, match="least_words is 0, expected 1 or more"):
        reward(["a"], folder, least_words=0)
    with pytest.raises(ValueError, match="got 1 prompts, expected 2 as completions"):
        harmless_reward(["a"], ["b", "c"], classifier=folder)
    with pytest.raises(ValueError, match=r"texts\[1\] is a NoneType, expected str"):
        reward(["a", None], folder)  # type: ignore[list-item]
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"^toxicity is absent: .*`python -m smopd.data fetch toxicity`"
    ):
        harmless_reward(["a"], ["b"])
    with pytest.raises(FileNotFoundError, match=r"^toxicity: no file .*model.safetensors$"):
        reward(["a"], str(tmp_path / "other"))
