"""Checks for test_checks.py: some fail, the ranks live on."""

import pytest
import torch
import torch.distributed as dist


def _sums_up(size: int) -> None:
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size


def check_passes(rank, size):
    _sums_up(size)


def check_fails_as_pytest_does(rank, size):
    with pytest.raises(TypeError):
        _sums_up(size)


def check_passes_then(rank, size):
    _sums_up(size)


def check_raises_on_one_rank(rank, size):
    if rank == 1:
        raise ValueError("of rank 1 only")
    _sums_up(size)


def check_skips(rank, size):
    pytest.skip("a skip is no pass")


def check_passes_still(rank, size):
    _sums_up(size)
