"""`python -m smopd.data`: what becomes of a download, whole, wrong, absent or without a network."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import requests

from smopd.data import __main__ as command
from smopd.data import fetch as fetching
from smopd.data.catalogue import DataSet, File, catalogue

CONTENT = bytes(range(256)) * 400
ROWS = [{"text": "zwölf", "n": [1, 2]}, {"text": "b", "n": []}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
UPSTREAM = "owner/name/c0ffee/dir/a.bin"


class Server:
    """Stands for the network: serves `files` by path below `base`."""

    base = "http://mirror"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []

    def download(self, url: str, output_file: Path, _: object) -> None:
        if not url.startswith(self.base):
            raise requests.ConnectionError(f"no route to {url}")
        path = url.removeprefix(self.base + "/")
        self.asked.append(path)
        if path not in self.files:
            raise requests.HTTPError("404 Client Error")
        Path(output_file).write_bytes(self.files[path])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    started = Server()
    monkeypatch.setattr(fetching, "RETRIES", 0)
    monkeypatch.setattr(fetching.pooch, "HTTPDownloader", lambda **_: started.download)
    return started


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def one_file(content: bytes = CONTENT, **changes: object) -> DataSet:
    file = replace(File("one/a.bin", UPSTREAM, len(content), sha256(content)), **changes)
    return DataSet("one", "", "MIT", "", None, (file,), {})


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_file_is_fetched_once(server: Server, tmp_path: Path) -> None:
    server.files[UPSTREAM] = CONTENT
    assert fetching.fetch([one_file()], folder=tmp_path, base=server.base + "/") == ([], [])
    assert (tmp_path / "one/a.bin").read_bytes() == CONTENT and left(tmp_path) == ["one/a.bin"]
    assert fetching.fetch([one_file()], folder=tmp_path, base=server.base) == ([], [])
    assert server.asked == [UPSTREAM]


def test_git_s_own_sum_is_known(server: Server, tmp_path: Path) -> None:
    server.files[UPSTREAM] = b"hello\n"
    hello = "ce013625030ba8dba906f756967f9e9ca394464a"  # echo hello | git hash-object --stdin
    known = one_file(sha256=None, git_sha1=hello)
    assert fetching.fetch([known], folder=tmp_path, base=server.base) == ([], [])
    server.files[UPSTREAM] = b"hullo\n"
    (failure,), _ = fetching.fetch([known], folder=tmp_path / "other", base=server.base)
    assert f"expected {hello}; nothing was kept" in failure and left(tmp_path) == ["one/a.bin"]


def test_a_flipped_byte_is_refused(server: Server, tmp_path: Path) -> None:
    wrong = bytearray(CONTENT)
    wrong[5000] ^= 1
    server.files[UPSTREAM] = bytes(wrong)
    (failure,), _ = fetching.fetch([one_file()], folder=tmp_path, base=server.base)
    assert failure.startswith("one/a.bin: ") and "\n" not in failure and left(tmp_path) == []
    assert sha256(CONTENT) in failure and sha256(bytes(wrong)) in failure


def test_a_file_that_is_not_there_does_not_stop_the_others(server: Server, tmp_path: Path) -> None:
    server.files["owner/b"] = CONTENT
    both = one_file()
    both = replace(both, files=(*both.files, replace(both.files[0], path="one/b.bin", upstream="owner/b")))
    (failure,), _ = fetching.fetch([both], folder=tmp_path, base=server.base)
    assert f"{server.base}/{UPSTREAM}: 404" in failure and left(tmp_path) == ["one/b.bin"]


def test_without_a_network_one_line_says_what_to_put_where(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = "http://elsewhere"
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    monkeypatch.setenv("SMOPD_DATA_MIRROR", base)
    assert command.main(["fetch", "safety", "api_bank"]) == 1
    captured = capsys.readouterr()
    (line,) = (line for line in captured.err.splitlines() if line.startswith("smopd.data: "))
    file = catalogue()["safe"].files[0]
    assert f"{base}/{file.upstream}" in line and str(file.sha256) in line
    assert f"put the file of that URL at {tmp_path / 'downloads'}" in line and "this command again" in line
    assert captured.out.startswith("safe: CC-BY-NC-4.0")  # said before anything is asked for
    assert "non-commercial use alone" in captured.out.splitlines()[0]


def test_another_file_in_its_place_is_left_alone(server: Server, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/a.bin").write_bytes(b"mine")
    (failure,), _ = fetching.fetch([one_file()], folder=tmp_path, base=server.base)
    assert "delete it to have it fetched" in failure and server.asked == []
    assert (tmp_path / "one/a.bin").read_bytes() == b"mine"


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_rows_are_made_of_the_upstream_file(server: Server, tmp_path: Path, suffix: str) -> None:
    source, upstream = tmp_path / f"source{suffix}", f"owner/name/c0ffee/rows{suffix}"
    if suffix == ".json":
        source.write_text(json.dumps(ROWS, indent=1))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), source)
    content, folder = source.read_bytes(), tmp_path / "data"
    packed = one_file(content, path="one/rows.jsonl.gz", upstream=upstream, rows_sha256=sha256(LINES))
    (failure,), _ = fetching.fetch([packed], folder=folder, base=server.base)
    place = Path(failure.partition("by hand: put the file of that URL at ")[2].partition(" (")[0])
    place.write_bytes(content)  # by hand
    assert fetching.fetch([packed], folder=folder, base=server.base) == ([], [])
    server.files[upstream] = content
    (folder / "one/rows.jsonl.gz").unlink()
    assert fetching.fetch([packed], folder=folder, base=server.base) == ([], [])
    assert gzip.decompress((folder / "one/rows.jsonl.gz").read_bytes()) == LINES
    assert left(folder) == ["one/rows.jsonl.gz"]
    (folder / "one/rows.jsonl.gz").write_bytes(gzip.compress(LINES, 1))  # packed otherwise, the same rows
    assert fetching.is_here(packed.files[0], folder)
    other = replace(packed, files=(replace(packed.files[0], rows_sha256="ab" * 32),))
    (failure,), _ = fetching.fetch([other], folder=tmp_path / "other", base=server.base)
    assert "its rows have sha256" in failure and not (tmp_path / "other/one/rows.jsonl.gz").exists()


def test_what_no_public_file_gives_is_told_and_no_failure(server: Server, tmp_path: Path) -> None:
    lone = one_file(upstream=None, sha256=None, path="one/rows.jsonl.gz", rows_sha256="ab" * 32)
    failures, (told,) = fetching.fetch([lone], folder=tmp_path, base=server.base)
    assert failures == server.asked == [] and "no public file is known" in told
    assert str(tmp_path / "one/rows.jsonl.gz") in told and "abab" in told


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fetch", "rla"]) == 2
    assert capsys.readouterr().err == "smopd.data: no data set 'rla'; did you mean rlla?\n"


def test_the_list_says_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    for file in (*catalogue()["api_bank"].files[:2], *catalogue()["tokenizer"].files):
        (tmp_path / file.path).parent.mkdir(exist_ok=True)
        (tmp_path / file.path).touch()
    assert command.main([]) == 0
    told = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line[:1].islower())
    assert set(told) == set(catalogue())
    whose = "partly (2 of 3 files), 2.0 MB, Apache-2.0, from github.com/qiancheng0/ToolRL"
    assert told["api_bank"].startswith(whose)
    assert told["tokenizer"].startswith("whole, 2.6 MB") and told["snips"].startswith("absent, 4.7 MB, CC0")


def test_every_file_of_the_catalogue_has_a_sum_and_a_commit() -> None:
    for data_set in catalogue().values():
        for file in data_set.files:
            assert file.path.startswith(data_set.name + "/")
            assert file.sha256 or file.git_sha1 or file.rows_sha256
            if file.upstream is not None:
                owner, name, commit, *path = file.upstream.split("/")
                assert len(commit) == 40 and int(commit, 16) and owner and name and path


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_the_sums_are_those_of_the_real_files(data_set, name: str) -> None:
    folder = data_set(name if name != "rlla" else "rlla/test")
    root = next(parent for parent in folder.parents if parent.name != name)
    checked = [file.path for file in catalogue()[name].files if fetching.is_here(file, root)]
    assert len(checked) >= len(catalogue()[name].files) - 2
