"""FSDP2 on two ranks resumes bit for bit, skips, offloads, and scores a LoRA student's base.

That gradients and updates equal one process's is shown by tests/smopd/run/test_invariance.py.
"""

from __future__ import annotations

import pytest

from tests.engine.student.training import on_two_ranks


@pytest.mark.slow
def test_fsdp2(tmp_path):
    on_two_ranks(tmp_path, "fsdp2")
