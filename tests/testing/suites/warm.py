"""Tests that do next to nothing."""

import pytest


@pytest.mark.ranks(4)
@pytest.mark.parametrize("number", range(60))
def test(group, number):
    group.barrier()
