"""Where ranks run: more of them than cores spread evenly, and may go wherever they might before."""

from __future__ import annotations

import os

import pytest

import ranks
from loops import each
from unisono.bootstrap.membership import Card, Membership
from unisono.costs.machine import DEFAULTS

SPREAD = """
everywhere = os.sched_getaffinity(0)
first = min(everywhere)
os.sched_setaffinity(0, {first})
group.barrier()
os.sched_setaffinity(0, everywhere)

def core():
    with open("/proc/self/stat") as file:
        return int(file.read().rpartition(")")[2].split()[36])

mine, all_cores, deadline = np.zeros(1), np.zeros((group.size, 1)), time.monotonic() + 30
while True:
    for _ in range(200):
        group.barrier()
    mine[0] = core()
    group.all_gather(all_cores, mine)
    late = np.array([float(time.monotonic() > deadline)])
    group.broadcast(late, src=0)
    if len(set(all_cores[:, 0])) > 1 or late[0]:
        break
assert len(set(all_cores[:, 0])) > 1, all_cores
assert os.sched_getaffinity(0) == everywhere
print("spread")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_that_share_a_core_spread() -> None:
    assert ranks.run(3, SPREAD) == ["spread\n"] * 3


KEPT = """
everywhere = sorted(os.sched_getaffinity(0))
mine = {everywhere[0]} if group.rank < 2 else set(everywhere[:2])
os.sched_setaffinity(0, mine)
calls = []
for _ in range(400):
    group.barrier()
    calls.append(os.sched_getaffinity(0) == mine)
assert all(calls), "the calls have changed where this thread may run"
group.close()
assert os.sched_getaffinity(0) == mine
print("kept")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("placement", ["0", "1"])
def test_a_thread_may_run_afterwards_where_its_caller_lets_it(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_PLACEMENT", placement)
    assert ranks.run(4, KEPT) == ["kept\n"] * 4


def card(rank: int, kernel: str, home: str, cores: int) -> Card:
    return Card(1, rank, "name", 1, 1, kernel, "network", home, 0, f"{cores:x}")


@each(
    ("cards", "cores"),
    [
        ([card(rank, "k", "h", 0b1111) for rank in range(8)], [4] * 8),
        ([card(rank, "k", "h", 1 << rank) for rank in range(4)], [4] * 4),  # each is bound to its own
        (
            [card(rank, "k", f"h{rank // 2}", 0b1111) for rank in range(4)],
            [2] * 4,
        ),  # two hosts of one machine
        ([card(0, "a", "h", 0b1), card(1, "b", "i", 1 << 200)], [1, 1]),
        ([card(rank, "k", f"h{rank}", 0b1) for rank in range(2)], [1, 1]),
    ],
)
def test_cores_of_a_host(cards: list[Card], cores: list[int]) -> None:
    membership = Membership(cards, b"", 4096, DEFAULTS)
    assert [membership.cores(rank) for rank in range(len(cards))] == cores
