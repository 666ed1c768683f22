"""Load causal language models and tokenizers from a folder or hub id."""

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, cached_file

from smopd.engine.errors import UnusableModel
from smopd.engine.hub import hub_responds

log = logging.getLogger(__name__)
# Config fields for operations on the logits.
SCALES = ("logit_scale", "output_multiplier", "output_multiplier_scale", "lm_head_multiplier")
DIVISOR = "logits_scaling"
MULTIPLIES = ("hyperclovax",)  # families that multiply logits by DIVISOR
CAPS = ("final_logit_softcapping", "logits_soft_cap")
_TOO_MANY = re.compile(rb'"\w*layers?": *\d{6,}')  # transformers would build lists of this length

CUSTOM_CODE = "it brings Python code, which runs only with model.trust_remote_code: true"
_custom_code = False


def allow_custom_code(allowed: bool) -> None:
    """Set whether models may run their own Python code in this process. By default they may not."""
    global _custom_code
    _custom_code = allowed


def custom_code() -> dict[str, bool]:
    """Return trust_remote_code for transformers and vLLM. If it is missing, transformers asks the user."""
    return {"trust_remote_code": _custom_code}


def load_model(path: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Load the model at `path`, a folder (~ is expanded) or hub id, in `dtype`.

    Raise FileNotFoundError if there is no model. Raise UnusableModel if the model is damaged or incomplete,
    has an unknown architecture, or is not a causal language model.
    """
    place, config = _read_config(path)
    with load_errors(path):
        found: Any = transformers.AutoModelForCausalLM.from_pretrained(
            place, config=config, dtype=dtype, output_loading_info=True, **custom_code()
        )
    model: PreTrainedModel = found[0]
    if missing := sorted(found[1]["missing_keys"]):
        shown = ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")
        lacks = f"{len(missing)} of the weights of a {type(model).__name__}"
        raise UnusableModel(f"model {path}: its files lack {lacks}: {shown}")
    _untie(model, path)
    _mend_generation(model, path)
    module: nn.Module = model  # transformers' annotation of `to` allows no device
    module.to(device)
    for value in (*model.parameters(), *model.buffers()):
        if value.device.type == "cpu":
            value.data = value.data.clone()  # a copy, as the memory-mapped file may be overwritten
    return model.eval()


def _untie(model: PreTrainedModel, path: str | Path) -> None:
    """Clear tie_word_embeddings if head and embedding differ. Raise UnusableModel if there is no head."""
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(getattr(output, "weight", None), Tensor):
        raise UnusableModel(f"model {path}: a {type(model).__name__} has no output head, expected lm_head")
    if output.weight is not embedding.weight:
        for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
            config.tie_word_embeddings = False


def _mend_generation(model: PreTrainedModel, path: str | Path) -> None:
    """If transformers would not save the generation config, replace it by a config of only the token ids."""
    given = model.generation_config
    if given is None:
        return
    try:
        given.validate(strict=True)
    except ValueError as error:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: value for name in names if (value := getattr(given, name)) not in (None, -1)}
        model.generation_config = transformers.GenerationConfig(**ids)
        why = " ".join(str(error).split())[:200]
        log.warning("model %s: exports keep only the token ids of its generation config (%s)", path, why)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model at `path`. Raise FileNotFoundError or UnusableModel if that fails."""
    place = place_of(path)
    with load_errors(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **custom_code())
    files = list(tokenizer.vocab_files_names.values())
    # without files, transformers creates an empty tokenizer
    if files and Path(place).is_dir() and not any((Path(place) / file).is_file() for file in files):
        raise FileNotFoundError(f"model {path}: has no tokenizer, expected one of {', '.join(files)}")
    return tokenizer


def stored_dtype(path: str | Path) -> torch.dtype:
    """Return the dtype in the model's config, or fp32 if it has none. Exports keep this dtype."""
    dtype = _read_config(path)[1].dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def require_usable(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UnusableModel if the config or the tokenizer cannot be saved, or if a token has no embedding."""
    config = _read_config(path)[1]
    size = config.get_text_config().vocab_size
    for token, token_id in tokenizer.get_vocab().items():
        if token_id >= size and token != tokenizer.pad_token:  # padding is masked and needs no embedding
            raise UnusableModel(
                f"model {path}: embeds {size} tokens, its tokenizer has {token!r} at {token_id}: "
                "resize the embeddings"
            )
    for name, part in (("config", config), ("tokenizer", tokenizer)):
        try:
            with TemporaryDirectory() as folder:
                part.save_pretrained(folder)
        except Exception as error:  # transformers validates when it saves
            raise UnusableModel(f"model {path}: its {name} cannot be saved ({_first_line(error)})") from error


def describe(
    path: str | Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedConfig, tuple[int, ...]]:
    """Return a model's config and its sorted end-of-sequence ids. Raise UnusableModel if there are none."""
    place, config = _read_config(path)
    with load_errors(path):
        try:
            generation = transformers.GenerationConfig.from_pretrained(place)
        except OSError:  # older checkpoints have no generation_config.json
            generation = transformers.GenerationConfig.from_model_config(config)
    ends = generation.eos_token_id
    listed = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    if wrong := [end for end in listed if not isinstance(end, int | None)]:
        raise UnusableModel(f"model {path}: its generation config has eos_token_id {wrong[0]!r}, not a token")
    if not (found := {end for end in listed if end is not None}):
        raise UnusableModel(f"model {path}: neither its generation config nor its tokenizer has an eos token")
    return config, tuple(sorted(found))


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the cache argument of `model.forward`, which is `cache` since transformers 5.24."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in names), "past_key_values")


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the decoder of `model`, without the head."""
    found = model.get_decoder()
    # get_decoder returns the model itself for Llama 4, and the head for ModernBERT
    return found if isinstance(found, PreTrainedModel) and found is not model else model.model


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder's layers: its first ModuleList of length num_hidden_layers, whatever its name."""
    n_layers = model.config.get_text_config().num_hidden_layers
    for module in decoder_of(model).children():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return module
    raise UnusableModel(f"model {model.name_or_path}: a {type(model).__name__} has no list of decoder layers")


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Enable activation checkpointing. transformers 5.23 renamed the method for this."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _read_config(path: str | Path) -> tuple[str, PreTrainedConfig]:
    """Return `place_of(path)`, from which the model can be loaded, and the model's config."""
    place = place_of(path)
    if Path(place).is_dir() and not (Path(place) / "config.json").is_file():
        raise FileNotFoundError(f"model {path}: this folder has no config.json, expected a saved model")
    with load_errors(path):
        return place, transformers.AutoConfig.from_pretrained(place, **custom_code())


def place_of(path: str | Path) -> str:
    """Return a folder (~ expanded), a hub id or, if the hub does not respond, the id's cached folder."""
    place = str(Path(path).expanduser()) if str(path).startswith("~") else str(path)
    if Path(place).is_dir():
        config = Path(place) / CONFIG_NAME
        if config.is_file() and (found := _TOO_MANY.search(config.read_bytes())):
            raise UnusableModel(f"model {path}: its config has {found[0].decode()}, too many to be meant")
        return place
    inside_folder = "/" in place and Path(place).parent.is_dir()
    if place.startswith((".", "/")) or place.count("/") > 1 or inside_folder:
        raise FileNotFoundError(f"model {path}: no such folder, expected one with config.json, or a hub id")
    if hub_responds():
        return place
    with load_errors(path):  # the hub does not respond: use its cache
        return str(Path(cached_file(place, CONFIG_NAME, local_files_only=True)).parent)


@contextmanager
def load_errors(path: str | Path) -> Iterator[None]:
    """Convert errors of transformers to one-line errors that name the model."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # from the operating system
            raise
        expected = f"a folder with a saved model, or a hub id that can be reached ({_first_line(error)})"
        raise FileNotFoundError(f"model {path}: cannot be loaded, expected {expected}") from error
    except UnpicklingError as error:  # raised before anything in the file has run
        text = "its pickled weights hold more than weights; expected safetensors"
        raise UnusableModel(f"model {path}: {text}") from error
    except Exception as error:  # from safetensors, torch or the config
        why = CUSTOM_CODE if "trust_remote_code" in str(error) else _first_line(error)
        raise UnusableModel(f"model {path}: cannot be loaded ({why})") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(" .:")


def logit_scale(config: Any) -> float:
    """Return the factor that a text config applies to the logits. Raise ValueError if it also caps them."""
    for name in CAPS:
        if cap := getattr(config, name, None):
            raise ValueError(f"{config.model_type} has {name}={cap}, expected none: this needs a linear head")
    return logit_factor(config)


def logit_factor(config: Any) -> float:
    """Return the factor that a text config applies to the logits, before any cap."""
    for name in SCALES:
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    divisor = getattr(config, DIVISOR, None)
    if divisor is None:
        return 1.0
    return float(divisor) if config.model_type in MULTIPLIES else 1.0 / float(divisor)


def logit_cap(config: Any) -> float | None:
    """Return c if a text config caps each logit x to c * tanh(x / c), else None."""
    return next((float(cap) for name in CAPS if (cap := getattr(config, name, None))), None)
