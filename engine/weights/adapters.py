"""LoRA adapters in peft's format: read, checked, and loaded into the model that they were made for."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from smopd.engine.models.loading import UnusableModel

PREFIX = "base_model.model."  # of names in an adapter's files
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
    try:  # transformers' own loading refuses every peft but the newest
        from peft import PeftConfig, inject_adapter_in_model
        from peft.utils import load_peft_weights, set_peft_model_state_dict
    except ImportError as error:
        raise UnusableModel(f"adapter {adapter.folder}: peft is not installed ({error})") from error
    try:
        folder = str(adapter.folder)
        weights = {
            key.removeprefix(PREFIX): value for key, value in load_peft_weights(folder, device="cpu").items()
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`|Some weights of")
            inject_adapter_in_model(PeftConfig.from_pretrained(folder), model, name)
            found = set_peft_model_state_dict(model, weights, name, ignore_mismatched_sizes=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnusableModel(f"adapter {adapter.folder}: cannot be loaded ({error})") from error
    wrong = [key for key in found.missing_keys if f".{name}." in key] + found.unexpected_keys
    if wrong:
        raise UnusableModel(
            f"adapter {adapter.folder}: {len(wrong)} of its weights do not fit {adapter.base}, "
            f"first {min(wrong)!r}"
        )
    return name


def use(model: PreTrainedModel, name: str | None) -> None:
    """From now on `model` computes with this one of its adapters, or with none."""
    for module in model.modules():
        if hasattr(module, "base_layer"):  # of peft's layers alone
            module.enable_adapters(name is not None)
            if name is not None:
                module.set_adapter(name)


def read_adapter(path: str | Path) -> Adapter | None:
    """The LoRA adapter in the folder `path`, or None where it holds no adapter_config.json.

    Raises:
        UnusableModel: it is no LoRA, names no base, or adapts the embeddings or the head.
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
    base = config.get("base_model_name_or_path")
    if not base:
        raise UnusableModel(f"adapter {path}: base_model_name_or_path is empty, expected the model's place")
    targets = config.get("target_modules") or []
    names = [targets] if isinstance(targets, str) else targets
    for name in [*names, *(config.get("modules_to_save") or [])]:
        if name.rsplit(".", 1)[-1] in EMBEDDINGS:
            raise UnusableModel(
                f"adapter {path}: adapts {name}, expected no embedding and no head (they are scored apart)"
            )
    return Adapter(folder, str(base), config)


def same_place(path: str | Path) -> str:
    """One spelling for one folder; a hub id stays as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else str(path)
