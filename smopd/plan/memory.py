"""What a model's training holds at once on one GPU, beside its parameters and optimiser state.

Shapes: T positions of a micro-batch (rows * L), N response tokens, D hidden, F intermediate, V vocabulary,
H heads of d each. Results are bytes; `width` is that of a number in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from smopd.kernels.head.chunks import ROW_UNIT, row_blocks
from smopd.kernels.head.gemm import padded_width
from smopd.plan.models import ModelSizes

FP32 = 4
ZERO_BUCKET, ZERO_LIVE = 500_000_000, 1_000_000_000  # DeepSpeed's defaults, in numbers
KNOWN_LAYERS = ("llama", "mistral", "qwen2")  # model types whose layers `layer_saved` describes


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward."""

    tokens: int
    """T."""
    mask: int
    """rows * L * L, the entries of the attention mask; 0 where sequences attend without one."""
    responses: int
    """N."""
    keys: int = 0
    """Positions of keys where they are more than T: on GPUs each response has its prompt's once more."""


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as memory goes."""

    width: int
    shards: int
    chunk_bytes: int
    checkpointing: bool = False
    adapter: int | None = None
    """Trained numbers of a LoRA student; None trains the model itself."""
    row_unit: int | None = None
    """Of a CPU's chunks of the fused head; None: a GPU's."""


def layer_saved(sizes: ModelSizes, batch: MicroBatch, width: int) -> int:
    """What one Llama or Qwen2 layer keeps from its forward for its backward.

        per position   2 norms        (4 + 2 width) D + 4    input in fp32, normalised, scaled; 1/rms
                       attention      width (2 H d + k) + 4 H    q, output; k = keys and values; log-sum-exp
                       MLP            4 width F              gate, silu(gate), up, their product
        once           width * mask                          the additive mask, made anew in each layer

    Under a mask keys and values are repeated to all heads: k = 2 H d; else k = 2 d * kv_heads * keys / T.
    """
    heads = sizes.heads
    norms = 2 * ((FP32 + 2 * width) * sizes.hidden + FP32)
    attention = 2 * width * sizes.head_dim * heads + FP32 * heads
    keys = heads * batch.tokens if batch.mask else sizes.kv_heads * max(batch.tokens, batch.keys)
    mlp = 4 * width * sizes.intermediate
    whole = batch.tokens * (norms + attention + mlp)
    return whole + 2 * width * sizes.head_dim * keys + width * batch.mask


def layer_forward(sizes: ModelSizes, batch: MicroBatch, width: int) -> int:
    """What a layer holds at once in a forward without gradients, its input included."""
    heads = sizes.heads * sizes.head_dim
    mlp = width * (3 * sizes.intermediate + 3 * sizes.hidden)
    attention = width * (4 * heads + 3 * sizes.hidden)
    return batch.tokens * max(mlp, attention) + (width + 1) * batch.mask


def model_saved(sizes: ModelSizes, batch: MicroBatch, training: Training) -> int:
    """What a forward through all layers leaves for the backward, up to the head.

    With checkpointing the layers' inputs and the mask; always the rotary table and the final norm.
    """
    width, hidden = training.width, sizes.hidden * batch.tokens
    outside = 2 * width * sizes.head_dim * batch.tokens + (FP32 + width) * hidden
    if training.checkpointing:
        return outside + sizes.layers * width * hidden + batch.mask
    return outside + sizes.layers * layer_saved(sizes, batch, training.width)


def backward_work(sizes: ModelSizes, batch: MicroBatch, training: Training) -> int:
    """What a layer's backward adds at its widest point, where the MLP's product is split.

    The gradients of product, gate and up less the product itself, and that of the residual stream; with
    checkpointing the layer made again from its input. What the final norm kept is gone by then.
    """
    width = training.width
    work = batch.tokens * (width * (2 * sizes.intermediate + sizes.hidden) - (FP32 + width) * sizes.hidden)
    if not training.checkpointing:
        return work
    shared = batch.tokens * sizes.hidden * FP32 if width == FP32 else 0
    return work + layer_saved(sizes, batch, width) - shared


def update_moments(sizes: ModelSizes, batch: MicroBatch, training: Training) -> dict[str, dict[str, int]]:
    """What an update holds at its widest moments, beside masters, gradients and optimiser state.

    FSDP2, of two micro-batches or more. The root (embeddings, final norm, head) stays whole from the forward
    to the end of the backward; one layer is whole at a time while the next one is on its way. A layer's
    gradient is whole, and once more in fp32 while it is reduced, until the next layer's is.
    """
    width, whole, sharded = training.width, training.adapter is None, training.shards > 1
    layer, root, head = sizes.layer_parameters, sizes.root_parameters, sizes.head_parameters
    reduced = layer if training.adapter is None else -(-training.adapter // sizes.layers)
    copies = 2  # of what is reduced, in fp32: before, after
    chunk, n_chunks = logits_chunk(sizes, batch.responses, training)
    hidden = width * batch.responses * sizes.hidden
    summed = FP32 if n_chunks > 1 else width
    saved = model_saved(sizes, batch, training)
    before = saved if training.checkpointing else saved - layer_saved(sizes, batch, width)
    work = backward_work(sizes, batch, training)
    split = min(reduced, sizes.hidden * sizes.intermediate)  # of the first of its layer's gradients
    in_backward = {
        "whole parameters": width * (root + layer * (1 + sharded)),
        "head gradient": width * head * whole,
    }
    return {
        "the loss": {
            "whole parameters": width * (root + layer * sharded),
            "activations": saved,
            "logits": chunk,
            "head gradient": 2 * hidden + summed * head * whole,
        },
        "the head's backward": {
            "whole parameters": width * root,
            "activations": saved,
            "head gradient": hidden + (summed + (width if summed != width else 0)) * head * whole,
        },
        "the last layer's backward": {
            **in_backward,
            "activations": saved + work,
            "whole gradients": width * split,
        },
        "the backward of the layer before": {
            **in_backward,
            "activations": before + work,
            "whole gradients": width * split + FP32 * reduced,
        },
        "a layer's reduction": {
            **in_backward,
            "whole parameters": width * (root + layer * sharded),
            "activations": before,
            "whole gradients": max(width + FP32, copies * FP32) * reduced,
        },
        "the end of the backward": {
            "whole parameters": width * root,
            "whole gradients": FP32 * reduced + width * (root + head * sizes.tied) * whole,
        },
        "the root's reduction": {
            "whole gradients": max(width + FP32, copies * FP32) * root * whole,
        },
    }


def zero_buffers(sizes: ModelSizes, training: Training, stage: int) -> dict[str, int]:
    """What DeepSpeed holds in place of FSDP2's whole layers: by its default bucket sizes, not measured."""
    bucket = min(sizes.parameters if training.adapter is None else training.adapter, ZERO_BUCKET)
    live = 0 if stage == 2 else min(sizes.parameters, ZERO_LIVE)
    return {
        "whole parameters": training.width * live,
        "whole gradients": (training.width + FP32) * bucket,
    }


def logits_chunk(sizes: ModelSizes, n_rows: int, training: Training) -> tuple[int, int]:
    """The buffer of the fused head's logits, and the number of chunks."""
    row_bytes = padded_width(sizes.vocabulary, training.width) * training.width
    most = training.chunk_bytes // row_bytes
    blocks = row_blocks(n_rows, most, training.row_unit or ROW_UNIT)
    return max((stop - start for start, stop in blocks), default=0) * row_bytes, len(blocks)
