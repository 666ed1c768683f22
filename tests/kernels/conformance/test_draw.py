"""draw on every backend: the token where the cumulative distribution exceeds the uniform number."""

import pytest
import torch

from tests.kernels import backends


@backends.each("draw")
@pytest.mark.parametrize(
    ("n_vocab", "dtype"), [(37, torch.bfloat16), (4096, torch.float32), (9001, torch.float16)]
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_float64(backend, n_vocab, dtype, temperature):
    torch.manual_seed(0)
    logits_RV = (3 * torch.randn(12, n_vocab)).to(dtype)
    logits_RV[1, : n_vocab // 2] = -torch.inf
    logits_RV[2] = -torch.inf
    logits_RV[2, n_vocab - 1] = 1.0  # only one token is possible
    uniform_R = torch.rand(12, dtype=torch.float64)
    uniform_R[0], uniform_R[1], uniform_R[2], uniform_R[3] = 0.0, 0.0, 0.0, 1 - 2.0**-53
    token_R, logp_R = backends.call(backend, "draw", logits_RV, temperature, uniform_R)
    logps_RV = (logits_RV.double() / temperature).log_softmax(-1)
    cumulative_RV = logps_RV.exp().cumsum(-1)
    index = token_R[:, None]
    after_R = cumulative_RV.gather(-1, index)[:, 0]
    mass_R = logps_RV.gather(-1, index)[:, 0].exp()
    assert (mass_R > 0).all() and token_R[2] == n_vocab - 1
    assert (uniform_R <= after_R + 1e-6).all() and (uniform_R >= after_R - mass_R - 1e-6).all()
    torch.testing.assert_close(logp_R.double(), mass_R.log(), rtol=0, atol=2e-5)
