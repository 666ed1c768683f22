"""What vLLM's engines hold of a GPU, and what is held of the weights on their way to one. Needs no vLLM."""

from __future__ import annotations

import weakref

import pytest
import torch

from smopd.engine.vllm_weights import Checked, architecture_of
from tests.engine.tiny import tiny_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("place", ["behind", "last", "absent"])
def test_a_tied_head_goes_with_its_embedding(tmp_path, place):
    """And nothing is kept of either."""
    model = tiny_model(tied=True)
    model.save_pretrained(tmp_path)
    names = [name for name in model.state_dict() if name != HEAD]
    if place != "absent":
        names.insert(1 if place == "behind" else len(names), HEAD)
    alive: list[weakref.ref] = []

    def stream():
        for name in names:
            value = model.state_dict()[name].clone()
            assert sum(reference() is not None for reference in alive) == 0, name
            alive.append(weakref.ref(value))
            yield name, value
            del value

    checked, taken = Checked(architecture_of(str(tmp_path)), stream()), []
    for name, value in checked:
        torch.testing.assert_close(value, model.state_dict()[name])
        taken.append(name)
        del value
    assert checked.error is None
    first = taken.index(EMBEDDING)
    assert taken[first + 1] == HEAD
    assert sorted(taken) == sorted(model.state_dict())
