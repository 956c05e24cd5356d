"""GOAL programs on LogGOPSim's network."""

import time

import pytest

import unisono as un
from unisono.simulation import Operation, loggops
from unisono.simulation.goal import ANY


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


def test_times_that_do_not_fit_are_refused() -> None:
    """They would wrap around."""
    for operation in (Operation("send", 1 << 61, 1), Operation("calc", (1 << 63) - 1)):
        with pytest.raises(ValueError, match="may take more than"):
            loggops([[operation], []])


def test_the_oldest_message_that_matches_is_taken() -> None:
    """A receive that takes any peer stands in one line with one that names it."""
    first = [Operation("recv", 8, ANY, 7), Operation("recv", 8, 1, 7)]
    then = [Operation("calc", 100, requires=(0,), cpu=1), Operation("calc", 5000, requires=(1,), cpu=2)]
    send = [Operation("send", 8, 0, 7)]
    model: dict[str, int] = {"o": 10, "L": 100, "g": 1, "G": 0, "O": 0}
    # rank 1's message comes first, and the older receive takes it: nothing takes that of rank 2
    with pytest.raises(un.SimulationError, match="rank 0, operation 1"):
        loggops(
            [first + then, send, [Operation("calc", 50), Operation("send", 8, 0, 7, requires=(0,))]], **model
        )
    # rank 2's comes first: the one that takes any has it, and rank 1's goes to the one that names it
    late = [Operation("calc", 50), Operation("send", 8, 0, 7, requires=(0,))]
    assert loggops([first + then, late, send], **model)[0] == 5000


def test_a_message_finds_its_receive_at_once() -> None:
    """100,000 receives are posted in the other order: a look at each of them would take a minute."""
    count = 100_000
    sends = [Operation("send", 8, 1, tag, requires=(tag - 1,) if tag else ()) for tag in range(count)]
    recvs = [Operation("recv", 8, 0, tag) for tag in reversed(range(count))]
    begun = time.process_time()
    loggops([sends, recvs], G=0)
    assert time.process_time() - begun < 15


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
