"""The size of a causal language model. This module does not import torch."""

from typing import Any, NamedTuple


class ModelNumbers(NamedTuple):
    """Dimensions and parameter count of a causal language model."""

    parameters: int
    """A head that is tied to the embedding is counted once."""
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    positions: int

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    def kv_bytes(self, width: int, parallel: int = 1) -> int:
        """Return the KV cache's bytes per position on each of `parallel` GPUs. width: bytes per element."""
        return 2 * self.layers * -(-self.kv_heads // parallel) * self.head_dim * width


def numbers_of(model: Any) -> ModelNumbers:
    """Return the size of a transformers model, which may be on the meta device."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    heads = config.num_attention_heads
    return ModelNumbers(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=head.weight.shape[0],
        tied=head.weight is model.get_input_embeddings().weight,
        positions=getattr(config, "max_position_embeddings", 0),
    )
