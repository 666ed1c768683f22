"""Servers that are lost in a step: on every rank a checkpoint of what is done, and the same end later."""

from __future__ import annotations

import pytest

from smopd.engine import distributed
from tests import warm
from tests.smopd.step.ended_worker import CASES, LAGGED, check, main


@pytest.mark.parametrize(("case", "done"), (CASES | LAGGED).items())
def test_a_run_without_servers_leaves_what_is_done(tmp_path, case, done):
    with distributed.process_group() as device:
        check(tmp_path, device, case, done)


@pytest.mark.slow
def test_on_two_ranks_one_of_them_is_enough(tmp_path):
    ran = warm.on_ranks(2, "-m", main.__module__, str(tmp_path))
    assert ran.returncode == 0, ran.stderr[-4000:]
