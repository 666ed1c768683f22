"""`smopd push`: what the folder holds, and what the hub is asked."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import yaml

from smopd.config.settings import Settings
from smopd.push import main, stage
from smopd.report.summary import write_card
from tests.engine.remote.conftest import Loopback
from tests.smopd.recipes import ROOT, TINY


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished student, with a card."""
    settings = Settings.model_validate(TINY | {"output": str(tmp_path)})
    student = tmp_path / "student"
    (student / "export").mkdir(parents=True)
    (student / "export/config.json").write_text("{}")
    (student / "done.json").write_text('{"steps": 4}')
    (student / "evaluation.json").write_text(json.dumps({"greedy/accuracy": 2.5, "greedy/format": None}))
    (tmp_path / "report.html").write_text("report")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    write_card(settings, tmp_path, "student", student / "export", step=4)
    return student


def test_a_card_has_results_rewards_and_teachers(run: Path) -> None:
    card = (run / "export/README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    assert "\n| **student (this model)** | 2.500 | - |" in text and "4 of 4 steps, from base" in text
    assert "- Teachers: accuracy_teacher, format_teacher" in text
    assert "| format | `smopd.rewards.rlla:format_reward` | 1.0 | (0.0, 1.0) |" in text
    settings = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert settings["name"] == "tiny" and settings["merge"]["method"] == "published"
    title = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"][0]["title"]
    assert title in " ".join(text.split())


def test_a_card_tells_no_password_of_a_teacher(run: Path) -> None:
    models = [{"model": f"http://me:hunter2@{name}:1", "reward": name} for name in ("accuracy", "format")]
    taught = Settings.model_validate(TINY | {"teachers": {"models": models}})
    write_card(taught, run.parent, "student", run / "export")
    card = (run / "export/README.md").read_text()
    assert "- Teachers: http://accuracy:1, http://format:1" in card and "hunter2" not in card


def test_a_card_tells_how_far_its_own_model_was_trained(run: Path) -> None:
    (run / "done.json").write_text('{"steps": 2}')
    write_card(Settings.model_validate(TINY), run.parent, "student", run / "export")
    assert "2 of 4 steps" in (run / "export/README.md").read_text()


def test_a_dry_run_writes_the_folder_and_uploads_nothing(run: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *_, **__: pytest.fail("uploaded"))
    for _ in range(2):
        assert main([str(run), "me/tiny", "--dry-run"]) == 0
    assert f"wrote {run / 'push'}" in capsys.readouterr().out
    names = {path.name for path in (run / "push").iterdir()}
    assert names == {"README.md", "config.json", "recipe.yaml", "report.html"}
    assert not (run / "push/README.md").samefile(run / "export/README.md"), "it may be edited"
    assert (run / "push/recipe.yaml").read_text() == (run.parent / "config.yaml").read_text()


def test_an_adapter_is_pushed_with_its_weights(run: Path) -> None:
    weights = run / "export/adapter/adapter_model.safetensors"
    weights.parent.mkdir()
    weights.touch()
    assert (stage(run) / "adapter" / weights.name).samefile(weights)


def test_a_link_to_a_run_is_pushed_with_its_recipe(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    run.symlink_to(run.rename(tmp_path / "other" / "student"))
    assert (stage(run) / "recipe.yaml").read_text() == (tmp_path / "config.yaml").read_text()


def test_an_error_of_the_hub_is_one_line(run: Path, monkeypatch, capsys) -> None:
    hub = Loopback(lambda path, body: (401, {}))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for said in ("401", "Connection refused"):
        with pytest.raises(SystemExit, match="2"):
            main([str(run), "me/tiny"])
        error = capsys.readouterr().err
        assert "cannot be pushed to me/tiny: " in error and said in error and error.count("\n") == 1
        hub.stop()


def test_a_push_makes_the_repository_and_uploads_the_folder(run: Path, monkeypatch, capsys) -> None:
    asked = []
    for method in ("create_repo", "upload_folder"):
        call = lambda _, *args, method=method, **kwargs: asked.append((method, args, kwargs)) or "https://hub"  # noqa: E731
        monkeypatch.setattr(huggingface_hub.HfApi, method, call)
    assert main([str(run), "me/tiny", "--private"]) == 0
    (_, (repo,), made), (_, (), sent) = asked
    assert repo == sent["repo_id"] == "me/tiny" and made == {"private": True, "exist_ok": True}
    assert sent["folder_path"] == run / "push" and "pushed to https://hub" in capsys.readouterr().out
    (run / "export/README.md").unlink()
    with pytest.raises(SystemExit, match="2"):
        main([str(run), "me/tiny"])
    assert "finish it with `smopd train`" in capsys.readouterr().err
