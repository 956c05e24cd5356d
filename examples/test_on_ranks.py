"""Tests on several ranks, for `pytest examples/test_on_ranks.py`. docs/testing.md explains them."""

import numpy as np
import pytest

import unisono as un


@pytest.mark.ranks([2, 4])
def test_sum(group: un.Group, rank: int) -> None:
    x = np.full(3, rank + 1.0)
    group.all_reduce(x)
    assert x[0] == sum(range(1, group.size + 1))


@pytest.mark.ranks(4, hosts=2)
@pytest.mark.parametrize("root", [0, 3])
def test_hosts(group: un.Group, root: int) -> None:
    """Ranks 0 and 1 share memory, so do ranks 2 and 3; everything else goes through sockets."""
    x = np.full(5, float(group.rank))
    group.broadcast(x, root)
    assert x.tolist() == [root] * 5


@pytest.mark.ranks(2)
def test_ranks_that_differ(group: un.Group, rank: int) -> None:
    with pytest.raises(un.Mismatch, match="ranks called different things"):
        group.barrier() if rank == 0 else group.all_reduce(np.ones(3))
