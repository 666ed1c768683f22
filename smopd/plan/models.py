"""How large a recipe's models are, from their configs alone: no weights, no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from smopd.config.schedule import BASE, needs_base, product_reference
from smopd.config.settings import Settings
from smopd.data.sources import import_function
from smopd.engine.models.loading import stored_dtype
from smopd.engine.models.sizes import ModelNumbers, numbers_of
from smopd.engine.weights.adapters import same_place
from smopd.names import is_url
from smopd.rewards.preference_model import BATCH_TOKENS, MAX_TOKENS
from smopd.run.failures import naming

ALL_LINEAR = "all-linear"
ADAPTER = "adapter_config.json"
PREFERENCE = "smopd.rewards.preference_model:preference_reward"


@dataclass(frozen=True)
class ModelSizes(ModelNumbers):
    """And what training it takes."""

    name: str
    kind: str
    layer_parameters: int
    """Of the largest decoder layer."""
    intermediate: int
    stored: torch.dtype
    linears: dict[str, int] = field(default_factory=dict)
    """Name of a linear layer inside the decoder's layers -> inputs plus outputs, over all layers."""

    @property
    def root_parameters(self) -> int:
        """What belongs to no decoder layer: embeddings, final norm, head."""
        return self.parameters - self.layers * self.layer_parameters

    def lora_parameters(self, rank: int, targets: Iterable[str]) -> int:
        """Of adapters beside the linear layers `targets`.

        Raises:
            ValueError: a target is no linear layer of this model.
        """
        wanted = set(self.linears) if ALL_LINEAR in targets else set(targets)
        if unknown := sorted(wanted - set(self.linears)):
            raise ValueError(f"targets {unknown} are none of the model's {sorted(self.linears)}")
        return rank * sum(self.linears[name] for name in wanted)


def sizes_of(path: str) -> ModelSizes:
    """Of the model at `path`: a folder with config.json, or a hub id. Raises as `load_model`."""
    stored = stored_dtype(path)
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return measured(model, path, stored)


def factory_sizes(factory: str, seed: int, kwargs: dict[str, Any]) -> ModelSizes:
    """Of the model that a recipe's factory makes, made on the meta device."""
    with torch.device("meta"):
        model, _ = import_function(factory)(seed=seed, **kwargs)
    return measured(model, factory, torch.float32)


def measured(model: PreTrainedModel, name: str, stored: torch.dtype = torch.float32) -> ModelSizes:
    """The sizes of `model`, which may be on the meta device.

    Raises:
        ValueError: it is no decoder of layers.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not layers or model.get_output_embeddings() is None:
        raise ValueError(f"{name}: a {type(model).__name__} has no decoder layers with a head on them")
    linears: dict[str, int] = {}
    for path, module in layers.named_modules():
        if isinstance(module, nn.Linear):
            last = path.rpartition(".")[2]
            linears[last] = linears.get(last, 0) + module.in_features + module.out_features
    return ModelSizes(
        **vars(numbers_of(model)),
        name=name,
        kind=model.config.model_type,
        layer_parameters=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        intermediate=model.config.intermediate_size,
        stored=stored,
        linears=linears,
    )


@dataclass(frozen=True)
class Scorer:
    """A preference model, as its reward's `kwargs` say."""

    sizes: ModelSizes
    batch_tokens: int
    longest: int

    @property
    def parameters(self) -> int:
        """Those of the causal model without its head; the classifier's head is one row."""
        return self.sizes.parameters - (0 if self.sizes.tied else self.sizes.head_parameters)


@dataclass(frozen=True)
class Models:
    """The models of one run."""

    student: ModelSizes
    teachers: tuple[ModelSizes, ...] = ()
    """Those that are held whole here: teachers, or the base of teachers' adapters."""
    n_teachers: int = 0
    """That are asked, with the reference of their product."""
    adapter_parameters: int = 0
    """Of all adapters among the teachers."""
    reference: ModelSizes | None = None
    """The reference policy, where neither the student nor the teachers hold its weights."""
    scorers: tuple[Scorer, ...] = ()
    """Preference models of the rewards, each in its worker on this rank's GPU."""


class ModelReader:
    """The models of a recipe's runs, each config read once.

    Raises:
        UnusableInput: a config cannot be read; names the setting.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self._known: dict[str, ModelSizes] = {}

    def of(self, own: Settings, name: str) -> Models:
        """Of the run `name`, whose resolved settings are `own`."""
        student = self.base()
        teachers = own.teachers.models if self.settings.runs[name].stage == "merge" else []
        whole: dict[str, ModelSizes] = {}
        adapters = 0
        for i, teacher in enumerate(teachers):
            setting = f"teachers.models.{i}.model"
            place = Path(teacher.model).expanduser()
            if is_url(teacher.model):
                continue
            if teacher.model in self.settings.runs:
                lora = self.settings.resolved(teacher.model).student.lora
                base = teacher.model if lora is None else self._start(teacher.model)
                whole[self._place(base)] = student
                adapters += 0 if lora is None else student.lora_parameters(lora.rank, lora.targets)
            elif (place / ADAPTER).is_file():
                with naming(setting):
                    config = json.loads((place / ADAPTER).read_text())
                base, targets = str(config["base_model_name_or_path"]), config["target_modules"]
                sizes = whole[self._place(base)] = self._read(base, setting)
                names = [targets] if isinstance(targets, str) else targets
                adapters += sizes.lora_parameters(config["r"], names)
            else:
                whole[self._place(teacher.model)] = self._read(teacher.model, setting)
        changed = product_reference(own, name)
        if changed is not None and not is_url(changed) and self._place(changed) not in whole:
            ours = changed == BASE or changed in self.settings.runs
            whole[self._place(changed)] = student if ours else self._read(changed, "opd.product.reference")
        reference = None
        if own.kl_ref.coef > 0:
            start = self._start(name)
            given = start if own.kl_ref.model == "init" else own.kl_ref.model
            under_adapters = own.student.lora is not None and self._place(given) == self._place(start)
            if not under_adapters and self._place(given) not in whole:
                ours = given in (BASE, start) or given in self.settings.runs
                reference = student if ours else self._read(given, "kl_ref.model")
        n_scored = len(teachers) + (changed is not None)
        scorers = tuple(self._scorers(own))
        return Models(student, tuple(whole.values()), n_scored, adapters, reference, scorers)

    def _scorers(self, own: Settings) -> Iterator[Scorer]:
        for i, reward in enumerate(own.rewards):
            given = reward.kwargs
            here = not given.get("url") and str(given.get("device") or "cuda").startswith("cuda")
            if reward.function == PREFERENCE and "model" in given and here:
                sizes = self._read(str(given["model"]), f"rewards.{i}.kwargs.model")
                tokens, longest = given.get("batch_tokens", BATCH_TOKENS), given.get("max_tokens", MAX_TOKENS)
                yield Scorer(sizes, int(tokens), int(longest))

    def _start(self, run: str) -> str:
        """What a run starts from; a merge is a model of its own."""
        init = self.settings.runs[run].init
        return init if isinstance(init, str) else f"{run}/start"

    def _place(self, model: str) -> str:
        """The same for two names of one model."""
        if model == BASE and not needs_base(self.settings):
            model = str(self.settings.model.path)
        return model if model == BASE or model in self.settings.runs else same_place(model)

    def base(self) -> ModelSizes:
        model = self.settings.model
        if model.path is not None:
            with naming("model.path"):
                return self._read(str(model.path), "model.path")
        name = str(model.factory)
        if name not in self._known:
            with naming("model.factory"):
                self._known[name] = factory_sizes(name, self.settings.seed, model.kwargs)
        return self._known[name]

    def _read(self, path: str, setting: str) -> ModelSizes:
        if path not in self._known:
            with naming(setting):
                self._known[path] = sizes_of(path)
        return self._known[path]
