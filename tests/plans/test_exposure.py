"""Messages that are read where they lie: run in any order of ranks, a plan ends as it does with copies."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest

from unisono.plans import ALGORITHMS, CONTRACTS, Chunk, Copy, Out, Plan, Recv, Reduce, Send, make
from unisono.plans.exposure import exposed

NAMES = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective]]


class Run:
    """A plan run with values that tell whose contributions they are; of what is open a reference is sent."""

    def __init__(self, plan: Plan, open_: list[list[bool]]) -> None:
        self.plan, self.open = plan, open_
        contract = CONTRACTS[plan.collective]
        space = "out" if contract.in_place else "in"
        self.memory: list[dict[Chunk, Any]] = [
            {
                Chunk(space, index): (rank, index)
                for index in range(max(1, plan.chunks(space)))
                if contract.gives(rank, plan.root)
            }
            for rank in range(plan.size)
        ]
        self.edges: dict[tuple[int, int], deque[Callable[[], Any]]] = defaultdict(deque)
        self.next = [0] * plan.size

    def ready(self) -> list[int]:
        return [rank for rank in range(self.plan.size) if self._ready(rank)]

    def _ready(self, rank: int) -> bool:
        steps = self.plan.steps[rank]
        if self.next[rank] == len(steps):
            return False
        return all(self.edges[peer, rank] for peer in _senders(rank, steps[self.next[rank]]))

    def advance(self, rank: int) -> None:
        number, memory = self.next[rank], self.memory[rank]
        step = self.plan.steps[rank][number]
        self.next[rank] += 1
        if isinstance(step, Send):
            kept = memory.get(step.chunk)
            message = (lambda: memory.get(step.chunk)) if self.open[rank][number] else (lambda: kept)
            for peer in step.to:
                self.edges[rank, peer].append(message)
        elif isinstance(step, Copy):
            memory[step.dst] = memory.get(step.src)
        elif isinstance(step, Recv):
            memory[step.chunk] = self.edges[step.frm, rank].popleft()()
        else:
            own = memory.get(step.own or step.chunk)
            memory[step.chunk] = tuple(
                own if peer == rank else self.edges[peer, rank].popleft()() for peer in step.frm
            )


def _senders(rank: int, step: Any) -> list[int]:
    if isinstance(step, Recv):
        return [step.frm]
    return [peer for peer in step.frm if peer != rank] if isinstance(step, Reduce) else []


def ended(plan: Plan, open_: list[list[bool]], order: random.Random) -> list[dict[Chunk, Any]]:
    run = Run(plan, open_)
    while ready := run.ready():
        run.advance(order.choice(ready))
    return run.memory


def what_is_open(plan: Plan) -> list[list[bool]]:
    return [exposed(rank, steps, plan.steps.__getitem__) for rank, steps in enumerate(plan.steps)]


@pytest.mark.parametrize(("collective", "name"), NAMES)
def test_reading_in_place_changes_nothing(collective: str, name: str) -> None:
    order = random.Random(f"{collective} {name}")
    for size in (2, 3, 4, 5, 8):
        plan = make(collective, name, size)
        none = [[False] * len(steps) for steps in plan.steps]
        expected = ended(plan, none, order)
        for _ in range(10):
            assert ended(plan, what_is_open(plan), order) == expected, plan


def opens(collective: str, name: str, size: int) -> tuple[int, int]:
    plan = make(collective, name, size)
    sends = [isinstance(step, Send) for steps in plan.steps for step in steps]
    return sum(sum(row) for row in what_is_open(plan)), sum(sends)


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "reduce_scatter", "broadcast", "gather"])
def test_what_is_only_read_is_open(collective: str) -> None:
    found, sends = opens(collective, "direct", 4)
    assert found == sends > 0


def test_two_shots_are_open_and_a_ring_is_not() -> None:
    """In two shots an answer tells that the question was read; round a ring only what is final stays."""
    found, sends = opens("all_reduce", "two_shot", 4)
    assert found == sends
    found, _ = opens("all_reduce", "one_shot", 4)
    assert found == 0
    found, sends = opens("all_reduce", "ring", 4)
    assert found == sends // 2


def test_an_answer_that_was_sent_before_tells_nothing() -> None:
    hasty = (
        (Send(Out(0), to=(1,)), Recv(Out(0), frm=1)),
        (Send(Out(0), to=(0,)), Recv(Out(0), frm=0)),
    )
    plan = Plan("all_reduce", "hasty", 2, 0, hasty)
    assert what_is_open(plan) == [[False, False], [False, False]]
