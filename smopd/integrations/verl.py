"""SMOPD inside verl: all teachers on every token, an unclamped forward KL, and weighted GDPO and GD2PO.

    VERL_USE_EXTERNAL_MODULES=smopd.integrations.verl python -m verl.trainer.main_ppo ... \\
        distillation.distillation_loss.loss_mode=smopd_forward_kl algorithm.adv_estimator=smopd_gdpo

Importing this module registers these names, replaces functions of verl, and prints a list of both.
Shapes: N tokens of this rank, R responses, K rewards, M teachers, S = topk.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import smopd
from smopd.integrations.shared import batch_advantages, log_weights, require_host, require_same_tokens
from smopd.kernels.checks import require_ids
from smopd.ops import teacher_mixture, topk_forward_kl

try:
    HOST_VERSION = require_host("verl", "0.9.1", "0.9.2")
except ImportError as refusal:  # printed on a line of its own, because verl's traceback is long
    print(f"smopd.integrations.verl is not loaded: {refusal}", file=sys.stderr)
    raise
core_algos = import_module("verl.trainer.ppo.core_algos")
losses = import_module("verl.trainer.distillation.losses")
ray_trainer = import_module("verl.trainer.ppo.ray_trainer")
v1_trainer = import_module("verl.trainer.ppo.v1.trainer_base")
teacher_manager = import_module("verl.experimental.teacher_loop.teacher_manager")
teacher_model = import_module("verl.experimental.teacher_loop.teacher_model")
torch_functional = import_module("verl.utils.torch_functional")
filesystem = import_module("verl.utils.fs")
tokenizers = import_module("verl.utils.tokenizer")
ulysses = import_module("verl.utils.ulysses")
worker_config = import_module("verl.workers.config")

ORIGINALS: dict[str, Callable[..., Any]] = {}  # verl's functions that were replaced, by name


def in_place_of(owner: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that replaces the owner's function of the same name everywhere in verl."""

    def put(ours: Callable[..., Any]) -> Callable[..., Any]:
        name = ours.__name__
        original = ORIGINALS[name] = getattr(owner, name)
        setattr(owner, name, ours)
        for key, module in list(sys.modules.items()):
            if key.startswith("verl.") and vars(module).get(name) is original:
                setattr(module, name, ours)
        return ours

    return put


LOSS_MODE = "smopd_forward_kl"
UNCLAMPED = {"use_policy_gradient": False, "loss_max_clamp": None, "log_prob_min_clamp": None}
WHOLE_LOGITS = ("fsdp", "fsdp2", "veomni")  # strategies that do not shard the vocabulary
_read_later: StorageWeakRef | None = None  # logits that the backward of our loss reads


@dataclass
class SmopdLossConfig(worker_config.DistillationLossConfig):  # type: ignore[name-defined]
    """verl's DistillationLossConfig, plus the settings of the mixture. verl's `topk` is kappa.

    teacher_weights: alpha by teacher key, summing to 1. None means equal weights.
    merge: True merges equal tokens of the teachers (Eq. 5), False keeps them separate (Eq. 6).
    tail: add a bucket for all tokens outside the support.
    """

    loss_mode: str = LOSS_MODE
    use_policy_gradient: bool = False
    loss_max_clamp: float | None = None
    log_prob_min_clamp: float | None = None
    teacher_weights: dict[str, float] | None = None
    merge: bool = True
    tail: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_unclamped(self)


def require_unclamped(settings: Any) -> None:
    """Raise ValueError if verl's settings would clamp the KL or turn it into a reward."""
    for name, expected in {"loss_mode": LOSS_MODE, **UNCLAMPED}.items():
        if getattr(settings, name) != expected:
            got, why = getattr(settings, name), f"{LOSS_MODE} is a supervised KL without a clamp"
            raise ValueError(f"distillation_loss.{name} is {got!r}, expected {expected!r}: {why}")


def rows(column: Tensor) -> Tensor:
    """Return this rank's rows (N, S) of a nested column (responses, positions, S)."""
    flat = column.values()[None]
    if ulysses.get_ulysses_sequence_parallel_world_size() > 1:
        flat = ulysses.slice_input_tensor(flat, dim=1)
    return flat[0]


@in_place_of(losses)
def compute_topk_loss(
    config: Any, distillation_config: Any, data: Any, student_logits: Tensor, data_format: str
) -> dict[str, Tensor]:
    """Compute each token's forward KL to the mixture that the teacher manager returned.

    Undo verl's division of logits by the rollout's temperature, because the teachers have temperature 1.
    """
    settings = distillation_config.distillation_loss
    if settings.loss_mode != LOSS_MODE:
        return ORIGINALS["compute_topk_loss"](config, distillation_config, data, student_logits, data_format)
    require_unclamped(settings)
    global _read_later
    _read_later = StorageWeakRef(student_logits.untyped_storage())
    if config.strategy not in WHOLE_LOGITS:
        raise NotImplementedError(f"{LOSS_MODE} needs whole logits; strategy {config.strategy} shards them")
    # The value is a tensor or verl's NonTensorData, which only [] unwraps.
    temperature = data["temperature"] if "temperature" in data.keys() else 1.0  # noqa: SIM118
    temperatures = set(torch.as_tensor(temperature).to(student_logits.dtype).flatten().tolist())
    if len(temperatures) != 1:
        raise ValueError(f"{LOSS_MODE}: temperatures are {sorted(temperatures)}, expected one for the batch")
    logits_NV, undo = student_logits[0], 1.0 / temperatures.pop()
    ids_NS, logps_NS = rows(data["teacher_ids"]), rows(data["teacher_logprobs"]).float()
    require_ids(LOSS_MODE, "teacher_ids", ids_NS, logits_NV.shape[1])
    tail = getattr(settings, "tail", True)
    logp_N, kl_N = topk_forward_kl(logits_NV, ids_NS[:, 0], ids_NS, logps_NS, tail=tail, temperature=undo)
    columns = {
        "distillation_losses": kl_N,
        "student_mass": student_mass(logits_NV.detach(), ids_NS, logps_NS, logp_N.detach(), undo),
        "teacher_mass": logps_NS.exp().sum(-1),
        "negative_share": (kl_N.detach() < 0).float(),
    }
    return {name: column_N[None] for name, column_N in columns.items()}


def student_mass(
    logits_NV: Tensor, ids_NS: Tensor, logps_NS: Tensor, first_logp_N: Tensor, temperature: float
) -> Tensor:
    """Return the student's probability of the support, (N,). `first_logp_N`: log-probability of its first id.

    Empty slots (-inf in `logps_NS`) and repeated ids do not count.
    """
    values_NS = logits_NV.gather(1, ids_NS.long()).float() / temperature
    student_NS = (values_NS - values_NS[:, :1] + first_logp_N[:, None]).exp()
    repeated_NS = (ids_NS[:, :, None] == ids_NS[:, None]).tril(-1).any(-1)
    return (student_NS * (torch.isfinite(logps_NS) & ~repeated_NS)).sum(-1)


@in_place_of(torch_functional)
def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Call verl's function, but not in place on logits that the backward of our loss reads later.

    flash-attn's in-place backward would overwrite them, and autograd would not notice.
    """
    kept = _read_later is not None and _read_later == StorageWeakRef(logits.untyped_storage())
    return ORIGINALS["logprobs_from_logits"](logits, labels, inplace_backward=inplace_backward and not kept)


@losses.register_distillation_loss(losses.DistillationLossSettings(names=[LOSS_MODE], use_topk=True))
def unclamped_forward_kl(
    config: Any, distillation_config: Any, model_output: dict[str, Tensor], data: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss for `loss_mode` smopd_forward_kl, (responses, positions), and its metrics."""
    if "negative_share" not in model_output:
        raise ValueError(f"{LOSS_MODE} saw no logits: set actor_rollout_ref.model.use_fused_kernels=false")
    mask = data["response_mask"]
    mask = (mask.to_padded_tensor(False) if mask.is_nested else mask).bool()
    metrics = {
        f"distillation/{name}": losses.no_padding_2_padding(model_output[name], data)[mask].mean().item()
        for name in ("student_mass", "teacher_mass", "negative_share")
    }
    return losses.no_padding_2_padding(model_output["distillation_losses"], data), metrics


ESTIMATORS: dict[str, tuple[str, str]] = {
    "smopd_gdpo": ("gdpo", "responses"),
    "smopd_gdpo_tokens": ("gdpo", "tokens"),
    "smopd_gd2po": ("gd2po", "tokens"),
    "smopd_batch_balanced": ("batch_balanced", "responses"),
    "smopd_saw": ("saw", "responses"),
    "smopd_dvao": ("dvao", "responses"),
}
"""verl's name -> name in smopd/advantages.py, and what the advantages are whitened over."""
# Rewards fetched from the v1 trainer's queue during its step, because verl fetches only ids and tensors.
REWARDS: dict[str, Any] = {}


def estimator(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the estimator `name` with verl's signature, for advantages and returns, (responses, positions).

    It reads `gdpo_reward_keys` and `gdpo_reward_weights` from `algorithm`. smopd_gd2po also reads
    `gd2po_snr_threshold`. None means that a reward could not be scored. Whitening over responses excludes
    responses without tokens.
    """
    own, whiten = ESTIMATORS[name]

    def estimate(
        response_mask: Tensor,
        index: Iterable[Any],
        config: Mapping[str, Any] | None = None,
        non_tensor_batch: Mapping[str, Iterable[float | None]] | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        settings, columns = config or {}, non_tensor_batch or {}
        keys = list(settings.get("gdpo_reward_keys") or ())
        if not keys or not columns.keys() >= set(keys):
            expected = f"names that compute_score returns; this batch has {sorted(columns)}"
            raise ValueError(f"{name}: algorithm.gdpo_reward_keys is {keys}, expected {expected}")
        rewards_KR = np.array([list(columns[key]) for key in keys], dtype=np.float32)  # None becomes NaN
        rewards_RK = torch.from_numpy(rewards_KR.T.copy()).to(response_mask.device)
        groups = np.unique(list(index), return_inverse=True)[1]
        group_R = torch.from_numpy(groups).to(response_mask.device)
        lengths_R = response_mask.sum(-1)
        # v1 pads the batch with copies that have no tokens, and so no weight when whitening over tokens.
        counted_R = (lengths_R > 0) | (whiten == "tokens")
        weights = settings.get("gdpo_reward_weights")
        weights_K = rewards_RK.new_tensor([1.0] * len(keys) if weights is None else list(weights))
        adv_R = rewards_RK.new_zeros(len(lengths_R))
        batch = (rewards_RK[counted_R], group_R[counted_R], weights_K, lengths_R[counted_R], whiten)
        adv_R[counted_R] = batch_advantages(own, *batch, settings.get("gd2po_snr_threshold"))
        return adv_R[:, None] * response_mask, adv_R[:, None] * response_mask

    return estimate


for _name in ESTIMATORS:
    core_algos.register_adv_est(_name)(estimator(_name))


@in_place_of(v1_trainer.PPOTrainer)
def _compute_advantage(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Fetch each response's reward_extra_info, then call verl's function."""
    theirs, name = ORIGINALS["_compute_advantage"], self.config.algorithm.adv_estimator
    if getattr(name, "value", name) not in ESTIMATORS:
        return theirs(self, batch, *args, **kwargs)
    fetched = v1_trainer.tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"]
    )
    rows = [fields.get("reward_extra_info") or {} for fields in fetched.pop("extra_fields").tolist()]
    names = {name for row in rows for name in row}
    REWARDS.update({name: np.array([row.get(name) for row in rows], dtype=object) for name in names})
    try:
        return theirs(self, batch, *args, **kwargs)
    finally:
        REWARDS.clear()


@in_place_of(ray_trainer)
def compute_advantage(data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
    """Pass the reward columns to SMOPD's estimators (verl does so only for gdpo), or call verl's function."""
    name = getattr(adv_estimator, "value", adv_estimator)
    if name not in ESTIMATORS:
        return ORIGINALS["compute_advantage"](data, adv_estimator, *args, **kwargs)
    if "response_mask" not in data.batch.keys():  # noqa: SIM118  (a TensorDict)
        data.batch["response_mask"] = ray_trainer.compute_response_mask(data)
    data.batch["advantages"], data.batch["returns"] = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=data.batch["token_level_rewards"],
        response_mask=data.batch["response_mask"],
        index=data.non_tensor_batch["uid"],
        config=kwargs.get("config"),
        non_tensor_batch={**data.non_tensor_batch, **REWARDS},
    )
    return data


@in_place_of(teacher_model.MultiTeacherModelManager)
def _initialize_teacher_model_managers(self: Any) -> None:
    """Compare the teachers' local tokenizers with the student's. Then start the teachers' servers."""
    settings = self.distillation_config
    if settings.distillation_loss.loss_mode == LOSS_MODE:
        mixed(settings.distillation_loss, settings.teacher_models)  # verl hides errors of its rollouts
        student = self.config.actor_rollout_ref.model
        options = {"trust_remote_code": student.get("trust_remote_code", False)}
        path = filesystem.copy_to_local(student.get("tokenizer_path") or student.path)
        own = tokenizers.hf_tokenizer(path, **options).get_vocab()
        for key, teacher in settings.teacher_models.items():
            try:
                other = tokenizers.hf_tokenizer(teacher.model_path, **options).get_vocab()
            except (OSError, ValueError) as missing:
                print(f"smopd: teacher {key!r} has no tokenizer here to compare: {missing}", file=sys.stderr)
                continue
            require_same_tokens(own, other, f"{key!r} ({teacher.model_path})")
    ORIGINALS["_initialize_teacher_model_managers"](self)


def mixed(settings: Any, teachers: Iterable[str]) -> tuple[list[str], Tensor]:
    """Return the teachers' keys and the logs of their weights. Raise ValueError for wrong weights."""
    keys = sorted(teachers)
    weights = getattr(settings, "teacher_weights", None) or dict.fromkeys(keys, 1.0 / len(keys))
    if sorted(weights) != keys:
        raise ValueError(f"teacher_weights names {sorted(weights)}, expected the configured teachers {keys}")
    return keys, log_weights([weights[key] for key in keys])


@in_place_of(teacher_manager.AsyncTeacherLLMServerManager)
async def compute_teacher_logprobs_single(
    self: Any, sequence_ids: list[int], *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Query all teachers at once. Return the mixture's ids and log-probabilities, (positions, topk) each."""
    ask, settings = ORIGINALS["compute_teacher_logprobs_single"], self.distillation_loss_config
    if settings.loss_mode != LOSS_MODE:
        return await ask(self, sequence_ids, *args, **kwargs)
    keys, log_alpha = mixed(settings, self.teacher_model_configs)
    kwargs.pop("routing_key", None)
    calls = (ask(self, sequence_ids, *args, routing_key=key, **kwargs) for key in keys)
    answers = await asyncio.gather(*calls)
    ids_NMS, logps_NMS = (torch.stack(column, dim=1) for column in zip(*answers, strict=True))
    merge = getattr(settings, "merge", True)
    mixture = teacher_mixture(ids_NMS, logps_NMS, log_alpha, settings.topk, merge=merge)
    return mixture.ids_NS, mixture.logps_NS


_replaced = ", ".join(f"{original.__module__}.{original.__qualname__}" for original in ORIGINALS.values())
print(
    f"smopd {smopd.__version__} in verl {HOST_VERSION}: registered loss_mode {LOSS_MODE}, adv_estimator "
    f"{', '.join(ESTIMATORS)}; replaced {_replaced}"
)
