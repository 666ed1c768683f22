"""What the tests of vLLM share."""

from collections.abc import Iterator

import pytest
import torch

from smopd.engine import distributed


@pytest.fixture(scope="session", autouse=True)
def device() -> Iterator[torch.device]:
    """A process group to the end of the session: vLLM keeps the one that its first engine was made in."""
    with distributed.process_group() as device:
        yield device
