"""`python -m smopd.data`: a loopback server stands in for the public repositories."""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pyarrow
import pyarrow.parquet
import pytest

from smopd.data import __main__ as command
from smopd.data import fetch as fetching
from smopd.data.catalogue import DataSet, File, Sum, catalogue

CONTENT = bytes(range(256)) * 4000
ROWS = [{"text": "zwölf", "n": [1, 2]}, {"text": "b", "n": []}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


class Server(ThreadingHTTPServer):
    """Serves `files` by path, ranges too.

    cut: of each path how many bytes an answer brings before the connection ends, a request after the other.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}
        self.cut: dict[str, list[int]] = {}
        self.ranged = True
        self.asked: list[tuple[str, str | None]] = []

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path, wanted = self.path.lstrip("/"), self.headers["range"]
        self.server.asked.append((path, wanted))
        if path in self.server.moved:
            self.send_response(302)
            self.send_header("location", "/" + self.server.moved[path])
            self.send_header("content-length", "0")
            self.end_headers()
            return
        if path not in self.server.files:
            self.send_error(404)
            return
        whole = self.server.files[path]
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranged else 0
        if start >= len(whole):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("content-range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
        self.send_header("content-length", str(len(whole) - start))
        self.end_headers()
        cuts = self.server.cut.get(path)
        self.wfile.write(whole[start : start + cuts.pop(0)] if cuts else whole[start:])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as started:
        thread = threading.Thread(target=started.serve_forever, daemon=True)
        thread.start()
        yield started
        started.shutdown()
        thread.join()


def one_file(content: bytes = CONTENT, **changes: object) -> DataSet:
    known = Sum("sha256", hashlib.sha256(content).hexdigest())
    file = File("one/a.bin", "owner/name/c0ffee/dir/a.bin", len(content), known, None)
    return DataSet("one", "", "MIT", "", None, (replace(file, **changes),), {})


UPSTREAM = "owner/name/c0ffee/dir/a.bin"


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_whole_file(server: Server, tmp_path: Path) -> None:
    server.files[UPSTREAM] = CONTENT
    assert fetching.fetch([one_file()], folder=tmp_path, base=server.base) == ([], [])
    assert (tmp_path / "one/a.bin").read_bytes() == CONTENT and left(tmp_path) == ["one/a.bin"]
    assert fetching.fetch([one_file()], folder=tmp_path, base=server.base) == ([], [])
    assert server.asked == [(UPSTREAM, None)]  # what is there is not asked for again


def test_a_redirect_is_followed_and_git_s_own_sum_is_known(server: Server, tmp_path: Path) -> None:
    server.moved[UPSTREAM], server.files["elsewhere"] = "elsewhere", b"hello\n"
    hello = Sum(
        "git_sha1", "ce013625030ba8dba906f756967f9e9ca394464a"
    )  # echo hello | git hash-object --stdin
    assert fetching.fetch([one_file(sum=hello)], folder=tmp_path, base=server.base + "/") == ([], [])
    assert (tmp_path / "one/a.bin").read_bytes() == b"hello\n"


@pytest.mark.parametrize("ranged", [True, False])
def test_a_download_cut_short_is_gone_on_with(server: Server, tmp_path: Path, ranged: bool) -> None:
    server.files[UPSTREAM], server.cut[UPSTREAM], server.ranged = CONTENT, [1000], ranged
    assert fetching.fetch([one_file()], folder=tmp_path, base=server.base) == ([], [])
    assert server.asked == [(UPSTREAM, None), (UPSTREAM, "bytes=1000-")]
    assert (tmp_path / "one/a.bin").read_bytes() == CONTENT and left(tmp_path) == ["one/a.bin"]


def test_a_later_command_goes_on_with_a_partial_file(server: Server, tmp_path: Path) -> None:
    server.files[UPSTREAM], server.cut[UPSTREAM] = CONTENT, [1000, 2000, 3000]
    (failure,), _ = fetching.fetch([one_file()], folder=tmp_path, base=server.base)
    assert "was cut short after 6,000 bytes" in failure and "goes on from there" in failure
    assert not (tmp_path / "one/a.bin").exists() and len(left(tmp_path)) == 1
    assert fetching.fetch([one_file()], folder=tmp_path, base=server.base) == ([], [])
    assert server.asked[-1] == (UPSTREAM, "bytes=6000-")
    assert (tmp_path / "one/a.bin").read_bytes() == CONTENT and left(tmp_path) == ["one/a.bin"]


def test_a_connection_that_brings_nothing_is_given_up(server: Server, tmp_path: Path) -> None:
    server.files[UPSTREAM], server.cut[UPSTREAM] = CONTENT, [0, 0, 0]
    (failure,), _ = fetching.fetch([one_file()], folder=tmp_path, base=server.base)
    assert "was cut short after 0 bytes" in failure and len(server.asked) == 1


def test_a_flipped_byte_is_refused(server: Server, tmp_path: Path) -> None:
    wrong = bytearray(CONTENT)
    wrong[5000] ^= 1
    server.files[UPSTREAM] = bytes(wrong)
    (failure,), _ = fetching.fetch([one_file()], folder=tmp_path, base=server.base)
    assert "one/a.bin" in failure and "nothing was kept" in failure and "\n" not in failure
    for content in (bytes(wrong), CONTENT):
        assert hashlib.sha256(content).hexdigest() in failure
    assert left(tmp_path) == []


def test_a_whole_partial_file_is_taken(server: Server, tmp_path: Path) -> None:
    """Killed between the last byte and the move: the server has no more to give (416)."""
    server.files[UPSTREAM] = CONTENT
    expected = one_file().files[0].sum
    (tmp_path / "one").mkdir()
    (tmp_path / f"one/.a.bin.{expected.value[:8]}.partial").write_bytes(CONTENT)
    assert fetching.fetch([one_file()], folder=tmp_path, base=server.base) == ([], [])
    assert left(tmp_path) == ["one/a.bin"]


def test_a_file_that_is_not_there_does_not_stop_the_others(server: Server, tmp_path: Path) -> None:
    server.files["owner/b"] = CONTENT
    both = one_file()
    both = replace(both, files=(*both.files, replace(both.files[0], path="one/b.bin", upstream="owner/b")))
    (failure,), _ = fetching.fetch([both], folder=tmp_path, base=server.base)
    assert f"{server.base}/{UPSTREAM} answered 404" in failure and left(tmp_path) == ["one/b.bin"]


def test_without_a_network_one_line_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        base = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    monkeypatch.setenv("SMOPD_DATA_MIRROR", base)
    assert command.main(["fetch", "safety", "api_bank"]) == 1
    captured = capsys.readouterr()
    (line,) = (line for line in captured.err.splitlines() if line.startswith("smopd.data: "))
    file = catalogue()["safe"].files[0]
    assert f"{base}/{file.upstream} cannot be reached" in line
    assert str(file.sum) in line and str(tmp_path / "downloads") in line and "this command again" in line
    assert captured.out.startswith("safe: CC-BY-NC-4.0")  # said before anything is asked for
    assert "non-commercial use alone" in captured.out.splitlines()[0]


def test_another_file_in_its_place_is_left_alone(server: Server, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/a.bin").write_bytes(b"mine")
    (failure,), _ = fetching.fetch([one_file()], folder=tmp_path, base=server.base)
    assert "delete it to have it fetched" in failure and server.asked == []
    assert (tmp_path / "one/a.bin").read_bytes() == b"mine"


def packed(upstream: bytes, suffix: str, lines: bytes = LINES) -> DataSet:
    return one_file(
        upstream,
        path="one/rows.jsonl.gz",
        upstream=f"owner/name/c0ffee/rows{suffix}",
        rows_sha256=hashlib.sha256(lines).hexdigest(),
    )


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_rows_are_made_of_the_upstream_file(server: Server, tmp_path: Path, suffix: str) -> None:
    source = tmp_path / f"source{suffix}"
    if suffix == ".json":
        source.write_text(json.dumps(ROWS, indent=1))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), source)
    upstream = source.read_bytes()
    server.files[f"owner/name/c0ffee/rows{suffix}"] = upstream
    folder = tmp_path / "data"
    assert fetching.fetch([packed(upstream, suffix)], folder=folder, base=server.base) == ([], [])
    assert gzip.decompress((folder / "one/rows.jsonl.gz").read_bytes()) == LINES
    assert left(folder) == ["one/rows.jsonl.gz"]
    (folder / "one/rows.jsonl.gz").write_bytes(gzip.compress(LINES, 1))  # packed otherwise, the same rows
    assert fetching.is_here(packed(upstream, suffix).files[0], folder)
    other = packed(upstream, suffix, LINES + b"{}\n")
    (failure,), _ = fetching.fetch([other], folder=tmp_path / "other", base=server.base)
    assert "its rows have sha256" in failure and not (tmp_path / "other/one/rows.jsonl.gz").exists()


def test_an_upstream_file_put_there_by_hand_is_used(server: Server, tmp_path: Path) -> None:
    upstream = json.dumps(ROWS).encode()
    data_set = packed(upstream, ".json")
    (failure,), _ = fetching.fetch([data_set], folder=tmp_path, base=server.base)
    place = Path(failure.partition("by hand: put the file of that URL at ")[2].partition(" (")[0])
    place.write_bytes(upstream)
    assert fetching.fetch([data_set], folder=tmp_path, base=server.base) == ([], [])
    assert left(tmp_path) == ["one/rows.jsonl.gz"] and len(server.asked) == 1


def test_what_no_public_file_gives_is_told_and_no_failure(server: Server, tmp_path: Path) -> None:
    lone = one_file(upstream=None, sum=None, path="one/rows.jsonl.gz", rows_sha256="ab" * 32)
    failures, (told,) = fetching.fetch([lone], folder=tmp_path, base=server.base)
    assert failures == [] and server.asked == []
    assert (
        "no public file is known" in told and str(tmp_path / "one/rows.jsonl.gz") in told and "abab" in told
    )


def test_the_base_has_to_be_a_url(tmp_path: Path) -> None:
    (failure,), _ = fetching.fetch([one_file()], folder=tmp_path, base="mirror.example/x")
    assert "mirror.example/x/owner/name" in failure and "cannot be reached" in failure


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fetch", "rla"]) == 2
    assert capsys.readouterr().err == "smopd.data: no data set 'rla'; did you mean rlla?\n"


def test_the_list_says_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    for file in catalogue()["api_bank"].files[:2]:
        (tmp_path / "api_bank").mkdir(exist_ok=True)
        (tmp_path / file.path).write_bytes(bytes(file.bytes))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/qwen.tiktoken").write_bytes(bytes(catalogue()["tokenizer"].files[0].bytes))
    assert command.main([]) == 0
    told = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line[:1].islower())
    assert set(told) == set(catalogue())
    assert told["api_bank"].startswith(
        "partly (2 of 3 files), 2.0 MB, Apache-2.0, from github.com/qiancheng0/ToolRL"
    )
    assert told["tokenizer"].startswith("whole, 2.6 MB") and told["snips"].startswith(
        "absent, 4.7 MB, CC0-1.0"
    )


def test_every_file_of_the_catalogue_has_a_sum_and_a_commit() -> None:
    for data_set in catalogue().values():
        for file in data_set.files:
            assert file.path.startswith(data_set.name + "/")
            assert file.sum is not None or file.rows_sha256 is not None
            if file.upstream is not None:
                owner, name, commit, *path = file.upstream.split("/")
                assert len(commit) == 40 and int(commit, 16) and owner and name and path
                httpx.URL(f"{fetching.GITHUB}/{file.upstream}")


@pytest.mark.parametrize("name", sorted(name for name, each in catalogue().items() if each.files))
def test_the_sums_are_those_of_the_real_files(data_set, name: str) -> None:
    folder = data_set(name if name != "rlla" else "rlla/test")
    root = next(parent for parent in folder.parents if parent.name != name)
    checked = [file.path for file in catalogue()[name].files if fetching.is_here(file, root)]
    assert len(checked) >= len(catalogue()[name].files) - 2
