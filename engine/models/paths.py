"""Choose how a model is computed. Check it against the transformers library, one sequence at a time."""

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smopd.engine.errors import UnusableModel
from smopd.engine.models import attention
from smopd.engine.models.head import head, response_hidden
from smopd.engine.models.loading import decoder_of
from smopd.engine.models.packing import flat_offsets, pack
from smopd.engine.settings import Packing
from smopd.engine.types import Attends, Layout, Rollout

log = logging.getLogger(__name__)
SHORT = 256
"""Ours: on a CPU, units with fewer positions than this are faster under a mask than by pieces."""
DESCRIPTIONS = {
    "pieces": "one sequence at a time",
    "mask": "packed rows under a mask",
    "plain": "one sequence in each row, not packed",
}
CHECK_BYTES = 4 << 30
"""Ours: maximum bytes of the self-check's activations. If they suffice, one of its sequences is longer than
the sliding window and the RoPE boundary."""
TOKEN_BYTES = 160  # ours: bytes of fp32 activations per token, layer and hidden dimension
CPU_LENGTH = 600  # ours: positions that a CPU computes within a second in a small model
CHECK_IDS = 1000  # ours: ids below this are ordinary tokens in most vocabularies
SMALL = 1 << 20  # ours: elements of a parameter; the gradients of larger ones would need too much memory
LOGP_BOUND, GRAD_BOUND = 1e-3, 1e-2
"""Ours, for fp32: bounds on the largest difference in nats and on the gradient's relative difference."""
ROUNDED_LOGP_BOUND, ROUNDED_GRAD_BOUND = 0.1, 0.3
"""Ours, for bf16: bounds on the mean difference in nats and on the gradient's relative difference."""
_AGREED: set[tuple] = set()
"""Keys of the models and layouts that have passed the self-check in this process."""


def choose(model: PreTrainedModel, wanted: str, dtype: torch.dtype) -> Layout:
    """Select the fastest attention that agrees with transformers, and return the layout of its batches.

    wanted: "auto", "sdpa" (never by pieces) or "flash" (only by pieces). Raise ValueError if "flash" does not
    suit the model. Raise UnusableModel if even single sequences disagree with transformers.
    """
    not_pieces = "as set" if wanted == "sdpa" else attention.why_not_pieces(model, dtype)
    not_packed = attention.why_not_packed(model)
    reasons = list(dict.fromkeys(reason for reason in (not_pieces, not_packed) if reason))
    ways: list[Attends] = [] if not_pieces else ["pieces"]
    if wanted != "flash":
        ways += ["plain"] if not_packed else ["mask", "plain"]
    for attends in ways:
        layout = layout_of(model, attends, reasons)
        off = disagreement(model, layout)
        if off is None:
            return layout
        reasons.append(f"{DESCRIPTIONS[attends]}: {off}")
    if wanted == "flash":
        raise ValueError(f"attention: 'flash' cannot serve, {reasons[0]}; expected 'auto' or 'sdpa'")
    text = f"a {type(model).__name__} cannot be computed here in {model.dtype} ({reasons[-1]})"
    raise UnusableModel(f"model {model.name_or_path}: {text}")


def choose_together(models: Sequence[PreTrainedModel]) -> Layout:
    """Select one layout for frozen models that score the same batches."""
    different = list({id(model): model for model in models}.values())
    layouts = [choose(model, "auto", model.dtype) for model in different]
    slowest = max(layouts, key=lambda layout: list(DESCRIPTIONS).index(layout.attends))
    for model in different:
        attention.set_attention(model, slowest.attends)
    if slowest.attends != "pieces":
        log.info("frozen models, attention: %s", slowest.description)
    limits = [layout.alone_above for layout in layouts if layout.alone_above is not None]
    return Layout(slowest.attends, slowest.one_row_from, min(limits, default=None), slowest.description)


def layout_of(model: PreTrainedModel, attends: Attends, reasons: Sequence[str] = ()) -> Layout:
    """Set the attention of `model` and return the layout."""
    attention.set_attention(model, attends)
    boundary = attention.rope_boundary(model.config.get_text_config())
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return Layout(attends, SHORT if model.device.type == "cpu" else 0, boundary, DESCRIPTIONS[attends] + why)


def disagreement(model: PreTrainedModel, layout: Layout) -> str | None:
    """Return how `model` under `layout` differs from transformers, or None if differences are within bounds.

    Log-probabilities are compared and, if the model is trained, the gradients of its small parameters.
    """
    rollouts = check_rollouts(model)
    exact = model.dtype == torch.float32 and not (model.device.type == "cuda" and layout.attends == "pieces")
    leaves = [parameter for parameter in decoder_of(model).parameters() if parameter.requires_grad]
    leaves = [each for each in leaves if each.numel() <= SMALL] or leaves[:1]
    key = (*architecture(model), layout.attends, len(leaves))
    if key in _AGREED:
        return None
    generator = torch.Generator().manual_seed(1)
    weight_N = torch.randn(flat_offsets(rollouts)[-1], generator=generator).to(model.device)

    def results(logps_N: Tensor) -> tuple[Tensor, Tensor]:
        if not leaves:
            return logps_N, logps_N.new_zeros(1)
        grads = torch.autograd.grad((logps_N * weight_N).sum(), leaves, allow_unused=True)
        return logps_N.detach(), torch.cat([grad.flatten().float() for grad in grads if grad is not None])

    try:
        with torch.set_grad_enabled(bool(leaves)):
            with native_attention(model):
                expected_N, expected_grad = results(single_logps(model, rollouts))
            logps_N, grad = results(_packed_logps(model, rollouts, layout))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any exception means that the architecture cannot do this
        return brief(error)
    if off := difference(model, logps_N, expected_N, exact):
        return off
    grad_off = float((grad - expected_grad).norm() / expected_grad.norm().clamp(min=1e-30))
    if not grad_off <= (GRAD_BOUND if exact else ROUNDED_GRAD_BOUND):
        return f"the gradient is {grad_off:.1e} off transformers"
    _AGREED.add(key)
    return None


def architecture(model: PreTrainedModel) -> tuple:
    """Return a key that is equal for models with the same computation."""
    return type(model), model.config.to_json_string(), model.dtype, model.device


def brief(error: Exception) -> str:
    """Return an error's class and the beginning of its message, in one line."""
    return f"{type(error).__name__} {' '.join(str(error).split())[:120]!r}"


def difference(
    model: PreTrainedModel, logps_N: Tensor, expected_N: Tensor, exact: bool | None = None
) -> str | None:
    """Return how `logps_N` differ from transformers' `expected_N`, or None if they agree within bounds."""
    exact = model.dtype == torch.float32 if exact is None else exact
    off_N = (logps_N - expected_N).abs()
    off = float(off_N.max() if exact else off_N.mean())
    if not off <= (LOGP_BOUND if exact else ROUNDED_LOGP_BOUND):
        return f"log-probabilities are {off:.1e} nats off transformers"
    return None


def check_rollouts(model: PreTrainedModel) -> list[Rollout]:
    """Return rollouts with shared prompts. If feasible, some exceed the sliding window and RoPE boundary."""
    config = model.config.get_text_config()
    longest = CHECK_BYTES // (TOKEN_BYTES * config.num_hidden_layers * config.hidden_size)
    longest = min(longest, getattr(config, "max_position_embeddings", None) or longest)
    if model.device.type == "cpu":
        longest = min(longest, CPU_LENGTH)
    edges = (attention.window_of(config), attention.rope_boundary(config))
    reach = [n for n in edges if n is not None and n + 12 <= longest]
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for group, (prompt, lengths) in enumerate([(5, (6, 3)), (max(9, *(n + 5 for n in reach), 9), (4, 7))]):
        n_ids = prompt + max(lengths)
        ids = torch.randint(2, min(config.vocab_size, CHECK_IDS), (n_ids,), generator=generator)
        given = tuple(ids[:prompt].tolist())
        for sample, length in enumerate(lengths):
            response = ids[prompt : prompt + length].roll(sample)
            rollouts.append(Rollout(given, response, torch.zeros(length), group, finished=True))
    return rollouts


@contextmanager
def native_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use transformers' own attention while the context is active."""
    before = model.config._attn_implementation
    attention.set_attention(model, "plain")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def single_logps(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> Tensor:
    """Return the responses' (N,) fp32 logps from transformers' own forward, one sequence at a time."""
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    logps = []
    for rollout in rollouts:
        ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.response_ids[:-1]])[None].to(model.device)
        n = len(rollout.response_ids)
        options = {"logits_to_keep": n} if keeps else {}
        attention.reset_rope(model)
        logits = model(input_ids=ids, use_cache=False, **options).logits[0, -n:]
        response = rollout.response_ids.to(model.device)
        logps.append(logits.float().log_softmax(-1).gather(-1, response[:, None])[:, 0])
    return torch.cat(logps)


def _packed_logps(model: PreTrainedModel, rollouts: Sequence[Rollout], layout: Layout) -> Tensor:
    logps, places = [], []
    for batch in pack(rollouts, Packing(), Layout(layout.attends, 0, layout.alone_above)):
        batch = batch.to(model.device)
        logits_NV = head(model).logits(response_hidden(model, batch)).float()
        logps.append(logits_NV.log_softmax(-1).gather(-1, batch.token_ids_N[:, None])[:, 0])
        places.append(batch.flat_N)
    return torch.cat(logps)[torch.cat(places).argsort()]
