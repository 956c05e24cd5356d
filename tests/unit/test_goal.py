"""GOAL programs on LogGOPSim's network."""

from __future__ import annotations

import pytest

import unisono as un
from unisono.simulation import Operation, loggops


def test_the_example_of_loggopsims_readme_takes_the_same_nanoseconds() -> None:
    """A binomial reduction of 1,024 bytes on 8 ranks, with that simulator's default parameters."""
    schedule = []
    for rank in range(8):
        below = [rank + (1 << k) for k in range(3) if (1 << k) < (rank & -rank or 8)]
        operations = [Operation("recv", 1024, peer) for peer in below]
        if rank:
            operations.append(Operation("send", 1024, rank & (rank - 1), requires=tuple(range(len(below)))))
        schedule.append(operations)
    assert sorted(loggops(schedule), reverse=True) == [34914, 24776, 13138, 13138, 1500, 1500, 1500, 1500]


def test_a_goal_program_that_never_ends_names_the_rank_and_the_operation() -> None:
    with pytest.raises(un.SimulationError, match="rank 1, operation 0"):
        loggops([[], [Operation("recv", 8, 0)]])


@pytest.mark.parametrize(
    "operation",
    [
        Operation("jump", 8),
        Operation("send", 8),
        Operation("send", 8, 7),
        Operation("send", -8, 0),
        Operation("calc", 8, cpu=300),
        Operation("calc", 8, requires=(3,)),
    ],
)
def test_a_wrong_operation_is_an_error(operation: Operation) -> None:
    with pytest.raises(ValueError, match="operation"):
        loggops([[operation]])
