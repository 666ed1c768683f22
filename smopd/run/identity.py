"""Digests of a run's inputs: rows of data, files of models, and modules with the user's functions."""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

import smopd
from smopd.config.settings import Settings
from smopd.data.places import located
from smopd.engine.imports import IMPORT_PATH
from smopd.engine.student.checkpoint import MANIFEST, file_digest
from smopd.engine.weights.adapters import read_adapter
from smopd.run.folder import FREE, Parts, flat, public
from smopd.run.inputs import ROWS, Inputs

WHOLE_BYTES = 64 << 20  # ours: larger files are compared by size, time and samples
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # ours
HIDDEN_DIGITS = 4  # ours: digits to keep of the digest of a redacted value
MODEL_FILES = {".safetensors", ".bin", ".json", ".model", ".txt", ".tiktoken", ".jinja", ".py"}
TEMPLATES = "additional_chat_templates"  # transformers' folder of named templates
PACKAGES = ("site-packages", "dist-packages")
_HERE = Path(smopd.__file__).parent


def identity(settings: Settings, inputs: Inputs, initial: str) -> Parts:
    """Return the digests of everything that the settings name. `initial` is the model before any training.

    A function that makes rows is represented by the digest of its rows.
    """
    found = {setting: {"rows": digest} for setting, digest in inputs.digests.items()}
    if settings.model.factory is not None:
        found["model.factory"] = model_parts(Path(initial))
        found["model.factory code"] = code_parts(settings.model.factory.partition(":")[0])
    for setting, value in named(settings):
        is_code = IMPORT_PATH.fullmatch(value)
        if setting.endswith("student.deepspeed_config") and (file := Path(value).expanduser()).is_file():
            found[setting] = {"file": file_digest(file)}
        elif parts := code_parts(value.partition(":")[0]) if is_code else named_model(value):
            found[setting] = parts
    shown = flat(public(settings).model_dump(mode="json"))
    for setting, value in flat(settings.model_dump(mode="json")).items():
        if value != shown.get(setting) and not setting.startswith(FREE):  # a short digest reveals little
            digest = hashlib.sha256(str(value).encode()).hexdigest()[:HIDDEN_DIGITS]
            found.setdefault(setting, {})["redacted"] = digest
    return found


def named_model(name: str) -> dict[str, str]:
    """Return the parts of the model in a folder or in the hub's cache, or {} if `name` is not a model."""
    with suppress(OSError, ValueError, RuntimeError):  # not a path, short name, user or hub id
        folder = located(name)
        if adapter := read_adapter(folder):
            base = named_model(adapter.base)
            return model_parts(folder) | {f"base: {part}": digest for part, digest in base.items()}
        if (folder / "config.json").is_file():
            return model_parts(folder)
        return hub_commit(name)
    return {}


def hub_commit(name: str) -> dict[str, str]:
    """Return the commit of a model in the hub's cache, or {} if the model is not there."""
    with suppress(OSError, ValueError):
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str) and not located(name).exists():
            return {"commit": Path(cached).parent.name}
    return {}


def hub_commits(settings: Settings) -> Parts:
    """Return the commits of the hub's models. Loading may fetch newer ones, so they are compared again."""
    found = {setting: hub_commit(value) for setting, value in named(settings)}
    return {setting: parts for setting, parts in found.items() if parts}


def named(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the path and value of each text setting that results depend on."""
    for setting, value in flat(settings.model_dump(mode="json")).items():
        if isinstance(value, str) and value and not setting.startswith((*FREE, *ROWS, "model.factory")):
            yield setting, value


def model_parts(folder: Path) -> dict[str, str]:
    """Return the digest of a model's manifest, which has all files' digests, or else the files' digests."""
    if (manifest := folder / MANIFEST).is_file():
        return {MANIFEST: file_digest(manifest)}
    files = sorted(path for path in (*folder.glob("*"), *folder.glob(f"{TEMPLATES}/*")) if path.is_file())
    return {str(path.relative_to(folder)): _digest(path) for path in files if path.suffix in MODEL_FILES}


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file or, if the file is large, of its size, time and samples."""
    facts = path.stat()
    if facts.st_size <= WHOLE_BYTES:
        return file_digest(path)
    digest = hashlib.sha256(f"{facts.st_size} {facts.st_mtime_ns}".encode())
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek((facts.st_size - SAMPLE_BYTES) * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def code_parts(module: str) -> dict[str, str]:
    """Return the digests of a module and of the modules that it imports, directly or indirectly.

    Imported modules of the standard library, of installed packages and of smopd are left out, because their
    versions are recorded. The modules are not imported here, because rewards must run only in workers.
    """
    found: dict[str, str] = {}
    waiting, seen = [module], {""}
    while waiting:
        name = waiting.pop()
        if name in seen or name.partition(".")[0] in sys.stdlib_module_names:
            continue
        seen.add(name)
        waiting.append(name.rpartition(".")[0])
        if (file := _file_of(name)) is None:
            continue
        installed = file.is_relative_to(_HERE) or not set(PACKAGES).isdisjoint(file.parts)
        if name == module or not installed:
            found[name] = file_digest(file)
        if not installed:
            waiting += _imported(name, file)
    return found


def _file_of(module: str) -> Path | None:
    """Find the file of a module without importing its packages."""
    parts = module.split(".")
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        specs = (finder.find_spec(name, path) for finder in sys.meta_path)
        try:
            spec = next((each for each in specs if each is not None), None)
        except KeyError:  # Python finds no namespace package inside a package that is not imported
            spec, path = None, [str(Path(place) / parts[i]) for place in path or ()]
            continue
        if spec is None or (spec.submodule_search_locations is None and i + 1 < len(parts)):
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


def _imported(name: str, file: Path) -> Iterator[str]:
    """Yield the names that a source file imports, including attributes that may be modules."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):  # an extension module
        return
    package = name if file.stem == "__init__" else name.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # a relative import goes beyond the top package
                relative = "." * node.level + (node.module or "")
                base = importlib.util.resolve_name(relative, package)
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
