"""Make the table of docs/real_model.md, and its results.json, from finished runs.

python -m examples.real_model.table FOLDER... [--against RUN ...] [--output FILE]

A FOLDER is a run directory of `python -m smopd.train` for one recipe and seed. Intervals are 95% percentile
bootstraps over the held-out prompts of one trained model. They do not include the spread over seeds.
Differences are paired by prompt and sampling seed. If the maximum of a reward is not 1, a column such as
`accuracy = 3` has the share of responses with this maximum. Entries of other recipes and seeds stay in FILE.
For several seeds, another table has mean and standard deviation.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smopd.config.cli import read_settings
from smopd.config.settings import Settings
from smopd.engine.files import write_atomically
from smopd.evaluate import COVERAGE, DRAWS, SEED
from smopd.record.files import JsonlLog

Values = Mapping[str, np.ndarray]
"""Column -> mean on each held-out prompt."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--against", nargs="*", default=[], metavar="RUN", help="runs to take differences from"
    )
    parser.add_argument("--output", type=Path, help="the numbers, as JSON")
    chosen = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for folder in chosen.folders:
        try:
            each = numbers(folder, chosen.against)
        except ValueError as error:
            parser.error(f"{folder}: {error}")
        key = f"{each['name']}/seed_{each['seed']}"
        if key in found:
            parser.error(f"{folder}: another folder has {key} too")
        found[key] = each
        print(f"{key}\n\n{markdown(each['runs'])}")
    kept = json.loads(chosen.output.read_text()) if chosen.output and chosen.output.exists() else {}
    kept |= found
    for name in dict.fromkeys(each["name"] for each in kept.values()):
        seeds = [each for each in kept.values() if each["name"] == name]
        if len(seeds) > 1:
            numbered = sorted(each["seed"] for each in seeds)
            print(f"{name}, seeds {', '.join(map(str, numbered))}\n\n{over_seeds(seeds)}")
    if chosen.output:
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dict(sorted(kept.items())), indent=1, allow_nan=False)
        write_atomically(chosen.output, f"{text}\n".encode())
    return 0


def numbers(folder: Path, against: Sequence[str]) -> dict[str, Any]:
    """Return the environment of one run directory, and each run's means, intervals, steps and time.

    Raises:
        ValueError: `against` is not a run of the recipe, or the runs have different numbers of prompts.
    """
    settings = read_settings(str(folder / "config.yaml"))
    labels = {"base": "Base"} | {name: run.label or name for name, run in settings.runs.items()}
    if unknown := sorted({*against} - {*labels}):
        raise ValueError(f"--against names {unknown[0]}, expected of {', '.join(labels)}")
    values = {
        run: by_prompt(folder / run, settings)
        for run in labels
        if (folder / run / "responses.jsonl").exists()
    }
    sizes = {run: found["greedy/sum"].size for run, found in values.items()}
    if len({*sizes.values()}) > 1:
        raise ValueError(f"expected as many held-out prompts in each run, got {sizes}")
    runs = {run: described(folder / run, labels[run], found) for run, found in values.items()}
    for run, found in values.items():
        for other in against:
            if other in values and other != run:
                apart = {name: found[name] - values[other][name] for name in found}
                runs[run].setdefault("less", {})[other] = with_intervals(apart)
    there = folder / "environment.json"
    environment = json.loads(there.read_text()) if there.exists() else {}
    kept = {key: environment.get(key) for key in ("git", "python", "packages", "cpus", "threads")}
    return {"name": settings.name, "seed": settings.seed, "environment": kept, "runs": runs}


def by_prompt(run: Path, settings: Settings) -> Values:
    """Return each reward, and their sum, per held-out prompt, greedy and sampled. NaN means no score."""
    items = [json.loads(line) for line in (run / "responses.jsonl").read_text().splitlines()]
    tops = {one.name: one.range[1] for one in settings.rewards if isinstance(one.range, tuple)}
    tops = {name: top for name, top in tops.items() if top != 1}
    seen: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        for name, value in item["rewards"].items():
            column, value = f"{item['kind']}/{name}", np.nan if value is None else value
            seen[column][item["prompt"]].append(value)
            if name in tops:
                whole = np.nan if np.isnan(value) else float(value > tops[name] - 1e-6)
                seen[f"{column} = {tops[name]:g}"][item["prompt"]].append(whole)
    means = {column: np.array([mean(of[prompt]) for prompt in sorted(of)]) for column, of in seen.items()}
    kinds = dict.fromkeys(column.partition("/")[0] for column in seen)
    names = [reward.name for reward in settings.rewards]
    for kind in kinds:
        means[f"{kind}/sum"] = np.sum([means[f"{kind}/{name}"] for name in names], axis=0)
    names += ["sum", *(f"{name} = {top:g}" for name, top in tops.items())]
    return {f"{kind}/{name}": means[f"{kind}/{name}"] for kind in kinds for name in names}


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN, or NaN if there are none."""
    scored = [value for value in values if not np.isnan(value)]
    return float(np.mean(scored)) if scored else np.nan


def described(folder: Path, label: str, values: Values) -> dict[str, Any]:
    lines = [row for row in JsonlLog(folder / "metrics.jsonl").read() if "seconds/update" in row]
    phases = sorted({key for row in lines for key in row if key.startswith("seconds/")})
    summary: dict[str, Any] = {"label": label, "columns": with_intervals(values), "steps": len(lines)}
    if lines:
        summary["seconds_a_step"] = {
            key.partition("/")[2]: round(float(np.median([row.get(key, 0.0) for row in lines])), 2)
            for key in phases
        }
    if (merged := folder / "merge.json").exists():
        summary["chosen"] = json.loads(merged.read_text())["chosen"]
    return summary


def with_intervals(values: Values) -> dict[str, dict[str, float]]:
    """Return mean and interval over prompts of each column that has a number."""
    generator = np.random.default_rng(SEED)
    found = {}
    for column, every in values.items():
        each = every[~np.isnan(every)]
        if not each.size:
            continue
        drawn = each[generator.integers(each.size, size=(DRAWS, each.size))].mean(1)
        low, high = np.percentile(drawn, [50 * (1 - COVERAGE), 50 * (1 + COVERAGE)])
        found[column] = {"mean": round(float(each.mean()), 4), "low": round(float(low), 4),
                         "high": round(float(high), 4)}  # fmt: skip
    return found


def markdown(runs: Mapping[str, Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for run in runs.values() for column in run["columns"]))
    rows: list[list[object]] = []
    for run in runs.values():
        rows.append([run["label"], run["steps"], *(cell(run["columns"].get(name)) for name in columns)])
        for other, apart in run.get("less", {}).items():
            rows.append([f"less {other}", None, *(cell(apart.get(name), "+") for name in columns)])
    return table(["run", "steps", *columns], rows) + "\n"


def over_seeds(seeds: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with each run's mean and standard deviation over seeds."""
    runs = {run: summary["label"] for each in seeds for run, summary in each["runs"].items()}
    columns = list(
        dict.fromkeys(
            name for each in seeds for summary in each["runs"].values() for name in summary["columns"]
        )
    )
    rows: list[list[object]] = []
    for run, label in runs.items():
        of = [each["runs"][run]["columns"] for each in seeds if run in each["runs"]]
        means = [[summary[name]["mean"] for summary in of if name in summary] for name in columns]
        cells = [
            f"{statistics.fmean(each):.3f} ± {statistics.stdev(each) if len(each) > 1 else 0:.3f}"
            for each in means
        ]
        rows.append([label, len(of), *cells])
    return table(["run", "seeds", *columns], rows) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table. All columns but the first are right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [["-" if cell is None else str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(found: Mapping[str, float] | None, sign: str = "") -> str:
    if found is None:
        return "-"
    return f"{found['mean']:{sign}.3f} ({found['low']:{sign}.3f} to {found['high']:{sign}.3f})"


if __name__ == "__main__":
    raise SystemExit(main())
