"""Where data is looked for, and short names."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from smopd.data.places import data_folder, located
from smopd.data.sources import load_rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of data."""
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    return tmp_path


def test_the_folder_is_the_variable_s_or_the_user_s_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOPD_DATA", "~/somewhere")
    assert data_folder() == Path.home() / "somewhere"
    monkeypatch.setenv("SMOPD_DATA", "")
    assert data_folder() == platformdirs.user_cache_path("smopd")
    monkeypatch.delenv("SMOPD_DATA")
    assert data_folder() == platformdirs.user_cache_path("smopd")


def test_a_short_name_is_a_path_in_the_folder(folder: Path) -> None:
    (folder / "rlla").mkdir()
    (folder / "rlla/rlla_4k_test.parquet").write_bytes(b"")
    assert located("rlla/test") == folder / "rlla/rlla_4k_test.parquet" and located("rlla") == folder / "rlla"
    assert located("./rlla") == Path("rlla") and located(Path("/a/b.json")) == Path("/a/b.json")
    with pytest.raises(FileNotFoundError) as raised:
        located("safe/alpaca_train")
    assert str(raised.value) == (
        f"safe/alpaca_train is absent: no {folder}/safe/alpaca_prompt_only_train.jsonl.gz; "
        f"`python -m smopd.data fetch safe` fetches it, or SMOPD_DATA ({folder}) names another folder"
    )


def test_a_source_may_be_a_short_name_which_comes_before_a_hub_id(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^rlla/test is absent: no .*fetch rlla"):
        load_rows("rlla/test")
    with pytest.raises(ValueError, match="is a file, which takes no kwargs"):
        load_rows("rlla/test", kwargs={"split": "train"})
    (folder / "safe").mkdir()
    (folder / "safe/alpaca_prompt_only_test.jsonl.gz").write_bytes(b"")
    assert load_rows("safe/alpaca_test") == []
