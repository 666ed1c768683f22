"""LoRA adapters in peft's format: reading, checking, and loading into their base model."""

import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from transformers import PreTrainedModel

from smopd.engine.models.loading import UnusableModel

PREFIX = "base_model.model."  # of the names in an adapter's files
BESIDES = ("bias", "modules_to_save", "trainable_token_indices")  # fields for other weights that peft trains
EMBEDDINGS = ("lm_head", "embed_tokens", "output", "wte", "embed_out")


class Adapter(NamedTuple):
    """A LoRA adapter in peft's format. `base` is the folder or hub id of its base model."""

    folder: Path
    base: str
    config: dict


def attach(model: PreTrainedModel, adapter: Adapter, name: str) -> str:
    """Add the adapter to `model` as `name`, and return `name`. Raise UnusableModel if it does not fit."""
    try:  # transformers' own loading needs the newest peft
        from peft import PeftConfig, inject_adapter_in_model
        from peft.utils import load_peft_weights, set_peft_model_state_dict
    except ImportError as error:
        raise UnusableModel(f"adapter {adapter.folder}: peft is not installed ({error})") from error
    try:
        folder = str(adapter.folder)
        saved = load_peft_weights(folder, device="cpu")
        weights = {key.removeprefix(PREFIX): value for key, value in saved.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`|Some weights of")
            inject_adapter_in_model(PeftConfig.from_pretrained(folder), model, name)
            found = set_peft_model_state_dict(model, weights, name, ignore_mismatched_sizes=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnusableModel(f"adapter {adapter.folder}: cannot be loaded ({error})") from error
    wrong = [key for key in found.missing_keys if f".{name}." in key] + found.unexpected_keys
    if wrong:
        text = f"{len(wrong)} of its weights do not fit {adapter.base}, first {min(wrong)!r}"
        raise UnusableModel(f"adapter {adapter.folder}: {text}")
    return name


def use(model: PreTrainedModel, name: str | None) -> None:
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.enable_adapters(name is not None)
            if name is not None:
                module.set_adapter(name)


def read_adapter(path: str | Path) -> Adapter | None:
    """Read the LoRA adapter in the folder `path`. Return None if there is no adapter_config.json.

    Raise UnusableModel if the adapter is not LoRA, names no base, or adapts the embeddings or the head. Also
    raise it for weights other than low-rank matrices, which would replace weights of the shared base.
    """
    folder = Path(path).expanduser()
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text())
        kind = config.get("peft_type")
    except (ValueError, AttributeError, RecursionError) as error:
        raise UnusableModel(f"adapter {path}: adapter_config.json cannot be read ({error})") from error
    if kind != "LORA":
        raise UnusableModel(f"adapter {path}: peft_type is {kind!r}, expected 'LORA'")
    base = config.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise UnusableModel(f"adapter {path}: base_model_name_or_path is {base!r}, expected its model")
    with suppress(OSError, ValueError, RuntimeError):  # no path, or no such user
        moved = folder.joinpath("../../..", *Path(base).parts[-2:]).resolve()  # of a run: FOLDER/base/export
        if moved.is_dir() and not Path(base).expanduser().is_dir():
            base = str(moved)
    given = config.get("target_modules") or []
    targets = [given] if isinstance(given, str) else given
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise UnusableModel(f"adapter {path}: target_modules is {str(given)[:80]!r}, expected module names")
    for name in targets:
        if name.rsplit(".", 1)[-1] in EMBEDDINGS:
            raise UnusableModel(f"adapter {path}: adapts {name}, expected no embedding and no head")
    for name in BESIDES:
        if (value := config.get(name)) not in (None, [], {}, "none"):
            raise UnusableModel(f"adapter {path}: {name} is {value!r}, expected none: the base is shared")
    if (weights := folder / "adapter_model.safetensors").is_file():
        with safe_open(weights, "pt") as opened:
            keys = list(opened.keys())
        layers = {key: key.rpartition(".lora_")[0] for key in keys}
        if wrong := [key for key in keys if layers[key].rpartition(".")[2] in ("", *EMBEDDINGS)]:
            expected = "low-rank matrices alone, and none of an embedding or a head"
            raise UnusableModel(f"adapter {folder}: has the tensor {wrong[0]}, expected {expected}")
    return Adapter(folder, base, config)


def same_place(path: str | Path) -> str:
    """Return the absolute path of a folder, or a hub id unchanged."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else str(path)
