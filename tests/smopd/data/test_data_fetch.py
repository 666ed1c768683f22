"""`python -m smopd.data` and short names: the data folder, and downloads that fail."""

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from smopd.data import __main__ as command
from smopd.data import fetch as fetching
from smopd.data.places import DataSet, File, catalogue, data_folder, located
from smopd.data.sources import load_rows

CONTENT = bytes(range(256)) * 400
GIT_SHA1 = "ce013625030ba8dba906f756967f9e9ca394464a"  # echo hello | git hash-object --stdin
ROWS = [{"text": "zwölf", "n": [1, 2]}, {"text": "b", "n": []}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the mirror serves."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("SMOPD_DATA_MIRROR", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setattr(fetching, "RETRIES", 0)
    yield folder
    server.shutdown()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def one_file(content: bytes = CONTENT, **changes: Any) -> DataSet:
    file = replace(File("one/a.bin", "a.bin", len(content), sha256(content)), **changes)
    return DataSet("one", "", "MIT", "", (file,))


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


KNOWN = [(CONTENT, one_file()), (b"hello\n", one_file(sha256=None, git_sha1=GIT_SHA1))]


@pytest.mark.parametrize(("content", "known"), KNOWN, ids=["sha256", "git"])
def test_a_file_is_fetched_once_and_a_flipped_byte_refused(upstream, tmp_path, content, known) -> None:
    (upstream / "a.bin").write_bytes(content)
    assert fetching.fetch([known], tmp_path / "right") == ([], [])
    (upstream / "a.bin").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert fetching.fetch([known], tmp_path / "right") == ([], [])
    (failure,), _ = fetching.fetch([known], tmp_path / "wrong")
    assert failure.startswith("one/a.bin: ") and "\n" not in failure
    assert str(known.files[0].sha256 or GIT_SHA1) in failure and left(tmp_path / "wrong") == []
    there = tmp_path / "right/one/a.bin"
    assert left(tmp_path / "right") == ["one/a.bin"] and there.read_bytes() == content
    (tmp_path / "mine").touch()
    assert there.stat().st_mode == (tmp_path / "mine").stat().st_mode, "that of any file"
    there.write_bytes(b"mine")
    (failure,), _ = fetching.fetch([known], tmp_path / "right")
    assert "delete it to download it again" in failure and there.read_bytes() == b"mine"


def test_without_a_network_one_line_says_what_to_put_where(upstream, tmp_path, monkeypatch, capsys) -> None:
    base = "http://127.0.0.1:1"
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    monkeypatch.setenv("SMOPD_DATA_MIRROR", base)
    assert command.main(["fetch", "safe", "api_bank"]) == 1
    captured = capsys.readouterr()
    (line,) = (line for line in captured.err.splitlines() if line.startswith("smopd.data: "))
    file = catalogue()["safe"].files[0]
    assert f"{base}/{file.upstream}" in line and str(file.sha256) in line
    assert f"put the file of that URL at {tmp_path / 'downloads'}" in line and "this command again" in line
    assert captured.out.startswith("safe: CC-BY-NC-4.0")  # said before anything is asked for
    assert "non-commercial use alone" in captured.out.splitlines()[0]


def test_rows_are_made_of_the_upstream_file(upstream: Path, tmp_path: Path) -> None:
    source, folder = upstream / "rows.json", tmp_path / "data"
    source.write_text(json.dumps(ROWS, indent=1))
    content, path = source.read_bytes(), folder / "one/rows.jsonl.gz"
    packed = one_file(content, path="one/rows.jsonl.gz", upstream="rows.json", rows_sha256=sha256(LINES))
    other = replace(packed, files=(replace(packed.files[0], rows_sha256="ab" * 32),))
    (failure,), _ = fetching.fetch([other], tmp_path / "other")
    assert "its rows have sha256" in failure and not (tmp_path / "other/one/rows.jsonl.gz").exists()
    source.unlink()
    (failure,), _ = fetching.fetch([packed], folder)
    place = failure.partition("by hand: put the file of that URL at ")[2].partition(" (")[0]
    Path(place).write_bytes(content)  # by hand
    assert fetching.fetch([packed], folder) == ([], [])
    assert gzip.decompress(path.read_bytes()) == LINES and left(folder) == ["one/rows.jsonl.gz"]
    path.write_bytes(gzip.compress(LINES, 1))  # packed otherwise, the same rows
    assert fetching.fetch([packed], folder) == ([], [])


def test_a_file_that_is_absent_or_of_no_public_source_stops_no_other(upstream: Path, tmp_path: Path) -> None:
    (upstream / "b.bin").write_bytes(CONTENT)
    (absent,) = one_file().files
    lone = File("one/rows.jsonl.gz", None, rows_sha256="ab" * 32)
    files = (absent, lone, replace(absent, path="one/b.bin", upstream="b.bin"))
    (failure,), (message,) = fetching.fetch([replace(one_file(), files=files)], tmp_path / "data")
    assert "/a.bin: 404" in failure and left(tmp_path / "data") == ["one/b.bin"]
    assert "no public file is known" in message and str(tmp_path / "data/one/rows.jsonl.gz") in message


def test_the_list_says_what_is_here_and_a_wrong_name_what_there_is(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    for file in (*catalogue()["api_bank"].files[:2], *catalogue()["tokenizer"].files):
        (tmp_path / file.path).parent.mkdir(exist_ok=True)
        (tmp_path / file.path).touch()
    assert command.main([]) == 0
    listed = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line[:1].islower())
    assert set(listed) == set(catalogue())
    partly = "partly (2 of 3 files), 2.0 MB, Apache-2.0, from github.com/qiancheng0/"
    begins = {"api_bank": partly, "tokenizer": "whole, 2.6 MB", "snips": "absent, 4.7 MB, CC0"}
    assert all(listed[name].startswith(begin) for name, begin in begins.items()), listed
    assert command.main(["fetch", "rla"]) == 2
    assert capsys.readouterr().err == "smopd.data: no data set 'rla'; did you mean rlla?\n"


def test_the_folder_is_the_variable_s_or_the_user_s_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOPD_DATA", "~/somewhere")
    assert data_folder() == Path.home() / "somewhere"
    monkeypatch.setenv("SMOPD_DATA", "")
    assert data_folder() == platformdirs.user_cache_path("smopd")


def test_a_short_name_is_a_path_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    absent = "`python -m smopd.data fetch safe` fetches it, or SMOPD_DATA .* names another folder$"
    absent = f"^safe/alpaca_test is absent: no {tmp_path}/safe/.*; {absent}"
    with pytest.raises(FileNotFoundError, match=absent):
        load_rows("safe/alpaca_test")  # no hub id
    (tmp_path / "safe").mkdir()
    (tmp_path / "safe/alpaca_prompt_only_test.jsonl.gz").write_bytes(b"")
    assert located("safe/alpaca_test") == tmp_path / "safe/alpaca_prompt_only_test.jsonl.gz"
    assert located("safe") == tmp_path / "safe" and load_rows("safe/alpaca_test") == []
    with pytest.raises(ValueError, match="is a file, which takes no kwargs"):
        load_rows("safe/alpaca_test", kwargs={"split": "train"})
    assert located("./safe") == Path("safe") and located(Path("/a/b.json")) == Path("/a/b.json")


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_the_sums_are_those_of_the_real_files(data_set, name: str) -> None:
    folder = data_set(name if name != "rlla" else "rlla/test")
    root = next(parent for parent in folder.parents if parent.name != name)
    there = [file for file in catalogue()[name].files if (root / file.path).is_file()]
    assert len(there) >= len(catalogue()[name].files) - 2
    for file in there:
        fetching.check(root / file.path, file)
    assert all(file.upstream is None or len(file.upstream.split("/")[2]) == 40 for file in there)
