"""Tests on ranks that end in every way. What must be reported of each is in test_pytest_ranks.py."""

import os
import signal
import subprocess
import time
import warnings

import numpy as np
import pytest

import unisono as un


@pytest.mark.ranks(4)
def test_sum(group, rank):
    x = np.full(3, rank + 1.0)
    group.all_reduce(x)
    assert x.tolist() == [10, 10, 10]


@pytest.mark.ranks([1, 3])
@pytest.mark.parametrize("numel", [1, 5])
def test_lists(group, numel, ranks):
    assert group.size == ranks
    x = np.ones(numel)
    group.all_reduce(x)
    assert x.tolist() == [ranks] * numel


@pytest.mark.ranks(4, hosts=2)
def test_hosts(group):
    assert group.choice("all_reduce", 64).algorithm == "leaders"


@pytest.mark.ranks(2)
def test_assertion(group, rank):
    print("rank", rank, "prints this")
    assert rank == 0, "rank 1 is wrong"
    group.barrier()


@pytest.mark.ranks(3)
def test_mismatch(group, rank):
    group.barrier() if rank == 2 else group.all_reduce(np.ones(4))


@pytest.mark.ranks(2)
def test_expected_mismatch(group, rank):
    with pytest.raises(un.Mismatch):
        group.barrier() if rank else group.all_reduce(np.ones(4))


@pytest.mark.ranks(2)
def test_one_call_more(group, rank):
    if rank == 1:
        group.broadcast(np.ones(4), 1)


@pytest.mark.ranks(2)
def test_message_left(group, rank):
    if rank == 1:
        group.send(np.ones(4), 0, tag=7)


@pytest.mark.ranks(3)
def test_exit(group, rank):
    if rank == 1:
        print("last words", end="")
        os._exit(3)
    group.barrier()


@pytest.mark.ranks(3)
def test_killed(group, rank):
    if rank == 2:
        subprocess.Popen(["sleep", "600"])  # has what its parent had open
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


@pytest.mark.ranks(2, timeout=2)
def test_hang(group, rank):
    if rank == 1:
        time.sleep(600)
    group.barrier()


@pytest.mark.ranks(2, timeout=2)
def test_stopped(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.timeout(2)
@pytest.mark.ranks(1)
def test_limit_of_pytest_timeout():
    time.sleep(600)


@pytest.mark.ranks(2)
def test_works_again(group):
    group.barrier()


@pytest.mark.ranks(2)
def test_skip_of_one(group, rank):
    if rank == 1:
        pytest.skip("not here")
    group.barrier()


@pytest.mark.ranks(2)
@pytest.mark.skipif(True, reason="nowhere")
def test_skipif(group):
    raise AssertionError


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True, reason="known", raises=ValueError)
def test_xfail_of_one(group, rank):
    if rank == 1:
        raise ValueError("the known one")
    group.barrier()


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True, reason="mended")
def test_xpass(group):
    group.barrier()


@pytest.mark.ranks(2)
def test_much_output(rank):
    print("x" * 3_000_000, "the end of", rank)
    assert rank == 1


@pytest.mark.ranks(2)
def test_subtests(rank, subtests):
    for number in range(3):
        with subtests.test(number=number):
            assert (number, rank) != (1, 1)


@pytest.fixture
def broken(rank):
    if rank == 1:
        raise LookupError("no such thing")


@pytest.mark.ranks(2)
def test_fixture_of_one_fails(broken, group):
    group.barrier()


@pytest.fixture
def skipping(rank):
    if rank == 1:
        pytest.skip("not on rank 1")


@pytest.mark.ranks(2)
def test_fixture_of_one_skips(skipping, group):
    group.barrier()


@pytest.mark.ranks(2)
def test_warning():
    warnings.warn("mind the gap", UserWarning, stacklevel=1)


@pytest.mark.ranks(3)
def test_every_rank_differs(rank):
    assert rank == 9


@pytest.mark.ranks(2)
def test_closes_the_group(group):
    group.close()


@pytest.mark.ranks(2)
def test_group_is_new(group):
    assert group.sequence == 0
    group.barrier()


def test_without_marker(group):
    raise AssertionError
