"""Where ranks run: more of them than cores spread evenly, and may go wherever they might before."""

import os
from pathlib import Path

import pytest

import ranks
from loops import each
from unisono.engine.bootstrap.peer_info import Membership, PeerInfo
from unisono.engine.costs.machine import DEFAULTS

PROGRAMS = Path(__file__).resolve().parent / "programs"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_that_share_a_core_spread() -> None:
    assert ranks.processes(3, PROGRAMS / "spreads.py") == ["spread\n"] * 3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("placement", ["0", "1"])
def test_a_thread_may_run_afterwards_where_its_caller_lets_it(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_PLACEMENT", placement)
    assert ranks.processes(4, PROGRAMS / "keeps_its_cores.py") == ["kept\n"] * 4


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
