"""The model card (README.md) of an exported run."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from smopd.config.recipe import write_yaml
from smopd.config.schedule import plan
from smopd.config.settings import Settings
from smopd.engine.files import write_atomically
from smopd.record.files import JsonlLog
from smopd.report.summary import evaluated_rows, facts, table_columns, training_seconds
from smopd.report.tables import cell, heading

CARD = "README.md"


def write_card(settings: Settings, folder: Path, name: str, export: Path, step: int | None = None) -> None:
    """Write the card of the run `name` in `folder` to its exported model. `step`: of a checkpoint."""
    own = settings.resolved(name)
    path = settings.model.path
    pages = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True)
    pages.filters["heading"] = heading
    text = pages.get_template("card.md").render(
        base=path if path is not None and not Path(path).exists() else None,
        title=own.runs[name].label or name,
        settings=settings,
        run=next(run for run in plan(settings) if run.name == name),
        step=step,
        rewards=own.rewards,
        rows=evaluated_rows(settings, folder),
        columns=table_columns(settings),
        facts=facts(settings, folder, training_seconds(JsonlLog(folder / name / "metrics.jsonl").read())),
        yaml=write_yaml(own, public=True),
        cell=cell,
    )
    write_atomically(export / CARD, text.encode("utf-8", "replace"))
