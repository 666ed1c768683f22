"""LoRA adapters in peft's format: read, checked, and loaded into the model that they were made for."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from smopd.engine.models.loading import UnusableModel

EMBEDDINGS = ("lm_head", "embed_tokens", "output", "wte", "embed_out")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in peft's format."""

    folder: Path
    base: str
    """The folder or hub id of the model that it was made for."""
    config: dict


def attach(model: PreTrainedModel, adapter: Adapter, name: str) -> str:
    """Loads the adapter into `model` beside those that it has, as `name`.

    Raises:
        UnusableModel: peft is not installed, or the adapter's weights do not fit the model.
    """
    try:
        with warnings.catch_warnings(), _no_report():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            info = model.load_adapter(str(adapter.folder), name)
    except ImportError as error:
        raise UnusableModel(f"adapter {adapter.folder}: peft is not installed ({error})") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise UnusableModel(f"adapter {adapter.folder}: cannot be loaded ({error})") from error
    wrong = [key for key in info.missing_keys if f".{name}." in key]
    wrong += [*info.unexpected_keys, *(key for key, *_ in info.mismatched_keys)]
    if wrong:
        raise UnusableModel(
            f"adapter {adapter.folder}: {len(wrong)} of its weights do not fit {adapter.base}, "
            f"first {min(wrong)!r}"
        )
    return name


@contextmanager
def _no_report() -> Iterator[None]:
    """Without transformers' report, which takes the adapters loaded before for weights newly initialized."""
    logger = logging.getLogger("transformers.integrations.peft")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def read_adapter(path: str | Path, base: str | Path | None = None) -> Adapter | None:
    """The LoRA adapter in the folder `path`, or None where it holds no adapter_config.json.

    Args:
        base: the model it belongs to; None: its base_model_name_or_path.
    Raises:
        UnusableModel: it is no LoRA, names no base, or adapts the embeddings or the head, which are scored
            apart from the model.
    """
    folder = Path(path).expanduser()
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text())
        kind = config.get("peft_type")
    except (ValueError, AttributeError) as error:
        raise UnusableModel(f"adapter {path}: adapter_config.json cannot be read ({error})") from error
    if kind != "LORA":
        raise UnusableModel(f"adapter {path}: peft_type is {kind!r}, expected 'LORA'")
    base = base or config.get("base_model_name_or_path")
    if not base:
        raise UnusableModel(f"adapter {path}: base_model_name_or_path is empty and no base was given")
    targets = config.get("target_modules") or []
    names = [targets] if isinstance(targets, str) else list(targets)
    names += config.get("modules_to_save") or []
    for name in names:
        if name.rsplit(".", 1)[-1] in EMBEDDINGS:
            raise UnusableModel(
                f"adapter {path}: adapts {name}, expected no embedding and no head (they are scored apart)"
            )
    return Adapter(folder, str(base), config)


def same_place(path: str | Path) -> str:
    """One spelling for one folder; a hub id stays as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else str(path)
