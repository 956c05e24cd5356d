"""The plan by which some ranks wait until all have made a call."""

from collections import Counter
from itertools import permutations

from loops import each
from unisono.plans import Recv, Send
from unisono.plans.agreement import agreement


@each("size", range(1, 6))
def test_who_waits_has_heard_of_all_and_no_message_is_left(size: int) -> None:
    for count in range(1, size + 1):
        for waiting in permutations(range(size), count):
            _run(size, waiting)


def _run(size: int, waiting: tuple[int, ...]) -> None:
    coming = {rank: list(agreement(rank, size, waiting)) for rank in range(size)}
    under_way: Counter[tuple[int, int]] = Counter()
    known = {rank: {rank} for rank in range(size)}
    while any(coming.values()):
        ready = [rank for rank, steps in coming.items() if steps and _can(steps[0], rank, under_way)]
        assert ready, ("deadlock", waiting)
        rank = ready[0]
        step = coming[rank].pop(0)
        if isinstance(step, Send):
            under_way.update((rank, peer) for peer in step.to)
        else:
            assert isinstance(step, Recv)
            under_way[step.frm, rank] -= 1
            known[rank] |= known[step.frm]
    assert not +under_way, ("left over", waiting)
    assert all(known[rank] == set(range(size)) for rank in waiting)


def _can(step: object, rank: int, under_way: Counter[tuple[int, int]]) -> bool:
    return not isinstance(step, Recv) or under_way[step.frm, rank] > 0
