"""The classifier of toxic comments out of its wheel: a folder stands in for the package index."""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from smopd.data import catalogue, wheels
from smopd.data.catalogue import DataSet, Sum, Wheel
from smopd.data.fetch import FetchError, fetch
from smopd.data.toxicity import write_classifier
from smopd.engine.student.checkpoint import read_manifest
from smopd.rewards.toxicity import toxicity
from tests.smopd.rewards.tiny_toxicity import MEMBERS, ROWS, WORDS, keras_scores, write_members

WHEEL = "tiny_toxicity-0.1-py3-none-any.whl"
RAN: list[str] = []


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return RAN.append, ("ran",)


def digest(content: bytes) -> Sum:
    return Sum("sha256", hashlib.sha256(content).hexdigest())


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """The entry of a wheel in the folder `index`, the only one where pip looks."""
    index = tmp_path / "index"
    index.mkdir()
    write_members(index)
    contents = {member: (index / Path(member).name).read_bytes() for member in MEMBERS}
    with zipfile.ZipFile(index / WHEEL, "w") as wheel:
        for member, content in contents.items():
            wheel.writestr(member, content)
        about = "Metadata-Version: 2.1\nName: tiny-toxicity\nVersion: 0.1\nRequires-Dist: no-such-package\n"
        wheel.writestr("tiny_toxicity-0.1.dist-info/METADATA", about)
        wheel.writestr("tiny_toxicity-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_toxicity-0.1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    packed = (index / WHEEL).read_bytes()
    sums = {member: digest(content) for member, content in contents.items()}
    entry = Wheel("tiny-toxicity==0.1", WHEEL, len(packed), digest(packed), "toxicity_classifier", sums)
    return DataSet("toxicity", "", "MIT", "", None, (), {}, entry)


def failure(data_set: DataSet, folder: Path) -> str:
    (line,), _ = fetch([data_set], folder=folder)
    assert "\n" not in line and line.startswith("toxicity: ") and not (folder / "toxicity").exists()
    return line


def test_the_classifier_is_what_the_wheel_holds(
    tiny: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "data/toxicity"
    assert fetch([tiny], folder=place.parent) == ([], [])
    assert {path.name for path in place.iterdir()} == {
        "model.safetensors", "words.json", "manifest.json", "manifest.sha256",
    }  # fmt: skip
    assert not list((place.parent / "downloads").iterdir())
    assert read_manifest(place)["source"] == f"tiny-toxicity==0.1, {tiny.wheel.sum}"
    known = json.loads((place / "words.json").read_text())
    assert known == {word: number for number, word in enumerate(WORDS, 1) if number < ROWS}
    assert len(load_file(place / "model.safetensors")) == 13  # two biases a direction
    weights = write_members(tmp_path)
    texts = {"The IDIOT -- is rare; über": [1, 5, 3, 7], "": [], "don't " * 130 + "dog": [6] * 99 + [2]}
    expected = torch.stack([torch.from_numpy(keras_scores(weights, ids)) for ids in texts.values()])
    torch.testing.assert_close(toxicity(list(texts), str(place)).double(), expected, atol=2e-6, rtol=0)
    assert expected[:, 0].std() > 0.01
    monkeypatch.setattr(wheels.subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    assert fetch([tiny], folder=place.parent) == ([], [])


def test_a_pickle_that_asks_for_more_runs_nothing(tmp_path: Path) -> None:
    write_members(tmp_path)
    evil = tmp_path / "evil.pickle"
    for what, name in ((Evil(), "builtins.getattr"), (print, "builtins.print"), (DataSet, "smopd.data")):
        evil.write_bytes(pickle.dumps(what))
        with pytest.raises(
            FetchError, match=rf"the pickled tokenizer asks for {name}[\w.]*; nothing was run"
        ):
            write_classifier(tmp_path / "model.weights.h5", evil, tmp_path)
    assert not RAN and not (tmp_path / "words.json").exists()


def test_another_member_and_an_index_without_the_wheel_are_plain_errors(
    tiny: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = replace(tiny, wheel=replace(tiny.wheel, requirement="tiny-toxicity==0.2"))
    assert failure(absent, tmp_path) == "toxicity: pip finds no tiny-toxicity==0.2"
    members = {**tiny.wheel.members, MEMBERS[1]: digest(b"other")}
    other = replace(tiny, wheel=replace(tiny.wheel, members=members))
    assert f"has {tiny.wheel.members[MEMBERS[1]]}, expected {digest(b'other')}" in failure(other, tmp_path)
    monkeypatch.setattr(wheels, "find_spec", lambda name: None if name == "h5py" else name)
    assert failure(tiny, tmp_path).endswith(
        "needs the package h5py; pip install 'smopd[smollm2]' installs it"
    )


def test_the_real_one_gives_the_numbers_of_its_package_s_page(data_set: Callable[[str], Path]) -> None:
    place = data_set("toxicity")
    source = catalogue.catalogue()["toxicity"].wheel
    assert read_manifest(place)["source"] == f"{source.requirement}, {source.sum}"
    shown = [
        0.9889402985572815, 0.07256772369146347, 0.620429277420044, 0.01934845559298992,
        0.8664075136184692, 0.04072948172688484,
    ]  # fmt: skip
    found = toxicity(["You are so dumb and stupid!"], str(place))[0]
    torch.testing.assert_close(found, torch.tensor(shown), atol=2e-6, rtol=0)
