"""BFCL's multi-turn categories, by the package bfcl-eval against a served export.

bfcl-eval asks in its own prompts, executes the calls in its own simulated services and writes a file of
scores for each category; here its two commands are run and those files read. It pins many packages, so it is
best installed in an environment of its own, whose Python is given:

    vllm serve EXPORT --port 8000
    python -m smopd.evals.bfcl.multi_turn http://localhost:8000/v1 EXPORT --python BFCL_ENV/bin/python
    python -m smopd.evaluate bfcl ... --multi-turn-scores runs/bfcl_multi_turn/score

Run with version 2026.3.23 on single items: at a loopback endpoint that replays an item's answer
(tests/smopd/evals/test_bfcl_package.py), and with a tiny model that vLLM serves (test_bfcl_vllm.py); no whole
category has been run. That version also needs `pip install soundfile`, which it does not name, and cannot
evaluate fewer than two answers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smopd.engine.files import write_atomically
from smopd.evals.bfcl.metrics import MEMORY, MULTI_TURN, WEB_SEARCH

REGISTERED = "Qwen/Qwen3-1.7B"  # of bfcl-eval's prompted models: ChatML, as Qwen2.5 has it
THREADS = 100  # bfcl-eval's default for served models
RUN_IDS = "test_case_ids_to_generate.json"
FAILED = "Error during inference"  # how bfcl-eval begins the result of an item that it could not ask
_SCORE_FILE = re.compile(r"BFCL_v4_(\w+)_score\.json")
_PROBE_SECONDS = 30  # ours
_SHOWN_LINES = 15  # ours: of the log, in an error


@dataclass(frozen=True)
class MultiTurnScores:
    """Accuracy by category as a fraction, and how many items could not be asked and so count as wrong."""

    accuracies: Mapping[str, float]
    failed: int


def run_multi_turn(
    url: str,
    model: str | Path,
    output: str | Path,
    *,
    categories: Sequence[str] = MULTI_TURN,
    python: str | Path = sys.executable,
    registered: str = REGISTERED,
    api_key: str = "EMPTY",
    threads: int = THREADS,
    ids: Mapping[str, Sequence[str]] | None = None,
) -> MultiTurnScores:
    """Generate and evaluate. What is in `output` already is not asked again.

    Args:
        url: of an OpenAI-compatible server, with its /v1.
        model: the export's folder, by which name the server must serve it; its tokenizer counts tokens.
        output: where results, scores and the log are written.
        categories: of bfcl-eval, multi-turn or agentic.
        python: of the environment in which bfcl-eval and its requirements are installed.
        registered: a model of bfcl-eval's registry whose handler writes the prompts.
        threads: requests at once.
        ids: category -> items, to run only these.
    Raises:
        ValueError, FileNotFoundError: a mistake in the arguments, no such server or model, bfcl-eval not
            installed, or it failed; the last lines of its log are in the error.
    """
    model, output = str(model), Path(output).expanduser().resolve()
    if not (Path(model) / "config.json").is_file():
        raise FileNotFoundError(f"model {model}: has no config.json, expected an export's folder")
    unknown = [name for name in categories if name not in (*MULTI_TURN, *WEB_SEARCH, *MEMORY)]
    if unknown or not categories:
        raise ValueError(f"categories: {unknown or 'none'}, expected of {', '.join(MULTI_TURN)}")
    served = served_models(url, api_key)
    if model not in served:
        raise ValueError(f"url {url}: serves {', '.join(served) or 'nothing'}, expected {model}")
    _check_installed(python, registered)
    output.mkdir(parents=True, exist_ok=True)
    if ids is not None:
        write_atomically(output / RUN_IDS, json.dumps({name: list(ids[name]) for name in ids}).encode())
    environment = {
        **os.environ,
        "BFCL_PROJECT_ROOT": str(output),
        "REMOTE_OPENAI_BASE_URL": url.rstrip("/"),
        "REMOTE_OPENAI_API_KEY": api_key,
    }
    common = ["--model", registered, "--test-category", ",".join(categories), "--result-dir", "result"]
    served_options = ["--skip-server-setup", "--local-model-path", model, "--num-threads", str(threads)]
    _run(
        [str(python), "-m", "bfcl_eval", "generate", *common, *served_options]
        + ["--run-ids"] * (ids is not None),
        environment,
        output,
    )
    _run(
        [str(python), "-m", "bfcl_eval", "evaluate", *common, "--score-dir", "score"]
        + ["--partial-eval"] * (ids is not None),
        environment,
        output,
    )
    accuracies = read_scores(output / "score")
    missing = [name for name in categories if name not in accuracies and (ids is None or name in ids)]
    if missing:
        raise ValueError(f"bfcl-eval: wrote no score of {', '.join(missing)}; see {output / 'log.txt'}")
    return MultiTurnScores(accuracies, _failed(output / "result"))


def read_scores(folder: str | Path) -> dict[str, float]:
    """The accuracies of a folder of bfcl-eval's score files, by category; single-turn ones are left out.

    Raises:
        ValueError, FileNotFoundError: no such folder, no score in it, two of one category, or another form.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"scores {folder}: no such folder, expected bfcl-eval's score folder")
    found: dict[str, float] = {}
    for path in sorted(folder.rglob("BFCL_v4_*_score.json")):
        match = _SCORE_FILE.fullmatch(path.name)
        if match is None or match[1] not in (*MULTI_TURN, *WEB_SEARCH, *MEMORY):
            continue
        if match[1] in found:
            raise ValueError(f"scores {folder}: has {match[1]} twice, expected the scores of one model")
        with path.open(encoding="utf-8") as lines:
            try:
                accuracy = float(json.loads(next(lines, "null"))["accuracy"])
            except (ValueError, TypeError, KeyError):
                accuracy = -1.0
        if not 0.0 <= accuracy <= 1.0:
            raise ValueError(f"{path}: line 1: expected an object with `accuracy` in 0 to 1")
        found[match[1]] = accuracy
    if not found:
        raise ValueError(f"scores {folder}: has no BFCL_v4_multi_turn_*_score.json or agentic one")
    return found


def served_models(url: str, api_key: str = "EMPTY") -> list[str]:
    """The models that a server names.

    Raises:
        ValueError: there is no OpenAI-compatible server at the address.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url {url!r}: expected http://HOST:PORT/v1")
    request = urllib.request.Request(
        url.rstrip("/") + "/models", headers={"Authorization": f"Bearer {api_key}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_SECONDS) as answer:
            return [str(entry["id"]) for entry in json.load(answer)["data"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"url {url}: no OpenAI-compatible server answers at /models: {error}") from None


def _check_installed(python: str | Path, registered: str) -> None:
    code = (
        "import sys; from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING as known;"
        "sys.exit(0 if sys.argv[1] in known else 3)"
    )
    try:
        done = subprocess.run([str(python), "-c", code, registered], capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"python {python}: {error.strerror}, expected a Python with bfcl-eval") from None
    if done.returncode == 3:
        raise ValueError(
            f"registered {registered!r}: unknown to bfcl-eval; `bfcl models` lists what it knows"
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise ValueError(f"python {python}: bfcl-eval cannot be imported, expected it there: {last}")


def _run(command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    with (output / "log.txt").open("a", encoding="utf-8") as log:
        done = subprocess.run(
            command,
            env=environment,
            cwd=output,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        last = (output / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
        raise ValueError(f"bfcl-eval {command[3]}: ended with {done.returncode}:\n" + "\n".join(last))


def _failed(results: Path) -> int:
    return sum(
        str(json.loads(line).get("result")).startswith(FAILED)
        for path in results.rglob("BFCL_v4_*_result.json")
        for line in path.read_text(encoding="utf-8").splitlines()
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a mistake is one line on standard error and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m smopd.evals.bfcl.multi_turn", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("url", help="of an OpenAI-compatible server, with its /v1")
    parser.add_argument("model", help="the export's folder, by which name it is served")
    parser.add_argument("--output", type=Path, default=Path("runs/bfcl_multi_turn"))
    parser.add_argument("--python", default=sys.executable, help="of the environment with bfcl-eval")
    parser.add_argument("--categories", nargs="+", default=list(MULTI_TURN))
    parser.add_argument("--threads", type=int, default=THREADS)
    given = parser.parse_args(argv)
    try:
        scores = run_multi_turn(
            given.url,
            given.model,
            given.output,
            categories=given.categories,
            python=given.python,
            threads=given.threads,
        )
    except (ValueError, FileNotFoundError) as error:
        print(f"smopd.evals.bfcl.multi_turn: {error}", file=sys.stderr)
        sys.exit(2)
    for name, accuracy in scores.accuracies.items():
        print(f"{name}: {100 * accuracy:.2f}")
    print(f"items that could not be asked, counted as wrong: {scores.failed}")


if __name__ == "__main__":
    main()
