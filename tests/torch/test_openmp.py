"""Ranks whose OpenMP threads outnumber the cores of their host are warned, once for each host."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from effort import HANG_S
from unisono.torch.openmp import warn_if_crowded
from unisono.torch.process_group import ProcessGroupUnisono


@pytest.fixture
def threads(monkeypatch):
    """Nothing is set, and PyTorch has so many threads."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("unisono.torch.openmp.usable_cores", lambda: 8)
    return lambda number: monkeypatch.setattr(torch, "get_num_threads", lambda: number)


def said(hosts: str, rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warn_if_crowded(hosts.split(), rank)
    return [str(each.message) for each in heard]


def test_the_first_rank_of_a_crowded_host_says_what_to_set(threads):
    threads(4)
    text, *more = said("a b a a b", 0)
    assert text.startswith("3 ranks with 4 OpenMP threads each share 8 cores: ")
    assert "Set OMP_NUM_THREADS=2, or OMP_WAIT_POLICY=PASSIVE, before the ranks are started" in text
    assert not more
    assert not said("a b a a b", 2)
    assert not said("a b a a b", 1)  # 8 threads on 8 cores
    threads(5)
    assert said("a b a a b", 1)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_who_has_chosen_is_not_warned(threads, monkeypatch, name):
    threads(64)
    monkeypatch.setenv(name, "8")
    assert not said("a a", 0)


def test_one_rank_and_ranks_of_one_thread_are_not_warned(threads):
    threads(64)
    assert not said("a b", 0)
    threads(1)
    assert not said(" ".join("a" * 64), 0)


def test_a_world_warns_and_the_groups_in_it_do_not(threads):
    threads(64)
    store = dist.HashStore()

    def rank(number: int) -> None:
        world = ProcessGroupUnisono(store, number, 2, timedelta(seconds=HANG_S), "world")
        world.split_group([0, 1]).shutdown()
        world.shutdown()

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(rank, range(2)))
    assert [str(each.message)[:23] for each in heard] == ["2 ranks with 64 OpenMP "]
