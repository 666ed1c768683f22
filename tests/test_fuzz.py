"""Fuzz every parser for a moment. Longer: `python -m tests.fuzz --minutes 60`."""

import pytest

from tests.fuzz import TARGETS, fuzz


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_its_own_mistakes_come_from_a_parser(name):
    tried, found = fuzz(name, seconds=0.5, seed=1)
    assert tried > 5 and not found, found
