"""Where ranks run: more of them than cores spread evenly, and may go wherever they might before."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import unisono as un
from effort import HANG_S
from loops import each
from unisono.engine.bootstrap.peer_info import Membership, PeerInfo
from unisono.engine.costs.machine import DEFAULTS

NEEDS_TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.fixture
def everywhere() -> Iterator[list[int]]:
    """Where this process may run, before and after the test."""
    cores = os.sched_getaffinity(0)
    yield sorted(cores)
    os.sched_setaffinity(0, cores)


@NEEDS_TWO
@pytest.mark.ranks(3)
def test_ranks_that_share_a_core_spread(group: un.Group, everywhere: list[int]) -> None:
    """They begin on one core, and go on until they run on several."""
    os.sched_setaffinity(0, everywhere[:1])
    group.barrier()
    os.sched_setaffinity(0, everywhere)
    mine, cores, deadline = np.zeros(1), np.zeros((group.size, 1)), time.monotonic() + HANG_S
    late = np.zeros(1)
    while len(set(cores[:, 0])) == 1 and not late[0]:
        for _ in range(200):
            group.barrier()
        mine[0] = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[36])
        group.all_gather(cores, mine)
        late[0] = time.monotonic() > deadline
        group.broadcast(late, src=0)
    assert len(set(cores[:, 0])) > 1, cores
    assert sorted(os.sched_getaffinity(0)) == everywhere


@NEEDS_TWO
@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", ["0", "1"])
def test_a_thread_may_run_afterwards_where_its_caller_lets_it(
    placement: str, everywhere: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four ranks are bound to a core: many calls do not change where each may run."""
    monkeypatch.setenv("UNISONO_PLACEMENT", placement)
    with un.init_process_group() as group:
        mine = set(everywhere[: 1 if group.rank < 2 else 2])
        os.sched_setaffinity(0, mine)
        for _ in range(400):
            group.barrier()
            assert os.sched_getaffinity(0) == mine
    assert os.sched_getaffinity(0) == mine


def info(rank: int, kernel: str, home: str, cores: int) -> PeerInfo:
    return PeerInfo(1, rank, "name", 1, 1, kernel, "network", home, 0, f"{cores:x}")


@each(
    ("peers", "cores"),
    [
        ([info(rank, "k", "h", 0b1111) for rank in range(8)], [4] * 8),
        ([info(rank, "k", "h", 1 << rank) for rank in range(4)], [4] * 4),  # each is bound to its own
        (
            [info(rank, "k", f"h{rank // 2}", 0b1111) for rank in range(4)],
            [2] * 4,
        ),  # two hosts of one machine
        ([info(0, "a", "h", 0b1), info(1, "b", "i", 1 << 200)], [1, 1]),
        ([info(rank, "k", f"h{rank}", 0b1) for rank in range(2)], [1, 1]),
    ],
)
def test_cores_of_a_host(peers: list[PeerInfo], cores: list[int]) -> None:
    membership = Membership(peers, b"", 4096, DEFAULTS)
    assert [membership.cores(rank) for rank in range(len(peers))] == cores
