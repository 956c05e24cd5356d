"""Plans that are wrong, each in its own way, and what the prover says about them.

The message names the rank and the step, so that whoever wrote the plan sees where to look.
"""

import re
from typing import Any

import pytest

from loops import each
from unisono.errors import PlanError
from unisono.plans import Copy, In, Out, Plan, Recv, Reduce, Send, Tmp, lower, make, prove
from unisono.plans.proof import EDGE_CAPACITY, Deadlock

O, T = Out(0), Tmp(0)  # noqa: E741
MANY = EDGE_CAPACITY + 1


def plan(collective: str, *steps: Any, root: int = 0) -> Plan:
    """A plan by hand: the steps of rank 0, rank 1, ..."""
    return Plan(collective, "broken", len(steps), root, tuple(tuple(of_rank) for of_rank in steps))


def all_but(collective: str, algorithm: str, size: int, rank: int, number: int, *instead: Any) -> Plan:
    """A right plan with one step replaced."""
    right = make(collective, algorithm, size)
    steps = list(right.steps)
    steps[rank] = (*steps[rank][:number], *instead, *steps[rank][number + 1 :])
    return Plan(collective, algorithm, size, 0, tuple(steps))


TO_ALL = [Send(O, (1, 2)), Send(O, (2, 0)), Send(O, (0, 1))]
IN_ORDER = Reduce(O, (0, 1, 2))

BROKEN = {
    "a contribution twice": (
        plan(
            "all_reduce",
            [Send(O, (1,)), Reduce(O, (0, 1)), Send(O, (1,))],
            [Send(O, (0,)), Reduce(O, (0, 1)), Reduce(O, (0, 1))],
        ),
        "rank 1, step 2, Reduce(Out(0), frm=(0, 1)): the contribution of rank 0 comes in twice",
    ),
    "a missing contribution": (
        plan(
            "all_reduce",
            *[[send, Reduce(O, (0, 1, 2))] for send in TO_ALL[:2]],
            [Send(O, (0, 1)), Recv(T, 0), Reduce(O, (1, 2))],
        ),
        "rank 2, step 3, end: Out(0) lacks the contribution of rank 0",
    ),
    "nothing is done on one rank": (
        plan("all_reduce", [Reduce(O, (0, 1))], [Send(O, (0,))]),
        "rank 1, step 1, end: Out(0) lacks the contribution of rank 0",
    ),
    "a cyclic wait": (
        plan("all_reduce", *[[Reduce(O, ((r - 1) % 3, r)), Send(O, ((r + 1) % 3,))] for r in range(3)]),
        "deadlock: rank 0 waits for rank 2 at step 0, Reduce(Out(0), frm=(2, 0)); rank 1 waits for rank 0",
    ),
    "read before write, scratch": (
        plan("broadcast", [Send(T, (1,))], [Recv(O, 0)]),
        "rank 0, step 0, Send(Tmp(0), to=(1,)): reads Tmp(0) before anything was written there",
    ),
    "read before write, output": (
        plan(
            "all_gather",
            [Send(Out(0), (1,)), Recv(Out(1), 1), Copy(Out(0), In(0))],
            [Copy(Out(1), In(0)), Send(Out(1), (0,)), Recv(Out(0), 0)],
        ),
        "rank 0, step 0, Send(Out(0), to=(1,)): reads Out(0) before",
    ),
    "read of a root's input elsewhere": (
        plan("scatter", [Send(In(1), (1,)), Copy(O, In(0))], [Copy(O, In(1)), Recv(O, 0)]),
        "rank 1, step 0, Copy(Out(0), In(1)): reads In(1) before anything was written there",
    ),
    "a message never taken": (
        plan("broadcast", [Send(O, (1,)), Send(O, (1,))], [Recv(O, 0)]),
        "rank 1 never takes 1 of the messages that rank 0 sends it (the last is step 1, Send(Out(0), to",
    ),
    "a message never sent": (
        plan("broadcast", [Send(O, (1,))], [Recv(O, 0)], [Recv(O, 0)]),
        "deadlock: rank 2 waits for rank 0 at step 0, Recv(Out(0), frm=0)",
    ),
    "the wrong root": (
        plan("reduce", [Reduce(O, (0, 1))], [Send(O, (0,))], root=1),
        "rank 0, step 1, end: Out(0) holds the contribution of rank 1",
    ),
    "the root's data not sent": (
        plan("broadcast", [Recv(O, 1)], [Send(O, (0,))]),
        "rank 0, step 1, end: Out(0) lacks the contribution of rank 0",
    ),
    "a root beyond the ranks": (plan("broadcast", [], [], root=2), "steps for 2 ranks and root 2"),
    "sent to itself": (
        plan("broadcast", [Send(O, (0, 1))], [Recv(O, 0)]),
        "rank 0, step 0, Send(Out(0), to=(0, 1)): names a rank twice, or itself",
    ),
    "received from itself": (
        plan("broadcast", [Send(O, (1,))], [Recv(O, 1)]),
        "rank 1, step 0, Recv(Out(0), frm=1): names a rank",
    ),
    "sent to a rank twice": (
        plan("broadcast", [Send(O, (1, 1))], [Recv(O, 0), Recv(O, 0)]),
        "rank 0, step 0, Send(Out(0), to=(1, 1)): n",
    ),
    "an unknown rank": (
        plan("broadcast", [Send(O, (1, 2))], [Recv(O, 0)]),
        "rank 0, step 0, Send(Out(0), to=(1, 2)): there is no rank 2",
    ),
    "a rank below zero": (
        plan("broadcast", [Send(O, (1,))], [Recv(O, -2)]),
        "rank 1, step 0, Recv(Out(0), frm=-2): there is no rank -2",
    ),
    "reduced from a rank twice": (
        plan("all_reduce", [Send(O, (1,)), Reduce(O, (0, 1))], [Send(O, (0,)), Reduce(O, (0, 0, 1))]),
        "rank 1, step 1, Reduce(Out(0), frm=(0, 0, 1)): names a rank twice",
    ),
    "a Reduce of nobody": (
        plan("all_reduce", [Reduce(O, ())]),
        "rank 0, step 0, Reduce(Out(0), frm=()): names a rank t",
    ),
    "a buffer clobbered that is not the root's": (
        plan("reduce", [Reduce(O, (0, 1))], [Send(O, (0,)), Recv(O, 2)], [Send(O, (1,))]),
        "rank 0, step 1, end: Out(0) lacks the contribution of rank 2",
    ),
    "partial sums left in a buffer that is not the root's": (
        plan("reduce", [Reduce(O, (0, 1))], [Reduce(O, (1, 2)), Send(O, (0,))], [Send(O, (1,))]),
        "rank 1, step 2, end: Out(0) holds the contribution of rank 2",
    ),
    "an output that is not this rank's": (
        plan("gather", [Copy(Out(0), In(0)), Recv(Out(1), 1)], [Send(In(0), (0,)), Copy(Out(1), In(0))]),
        "rank 1, step 2, end: writes Out(1), which is not its to write",
    ),
    "the input written": (
        plan(
            "reduce_scatter",
            [Send(In(1), (1,)), Reduce(In(0), (0, 1)), Copy(O, In(0))],
            [Send(In(0), (0,)), Reduce(O, (0, 1), own=In(1))],
        ),
        "rank 0, step 1, Reduce(In(0), frm=(0, 1)): writes In(0), the caller's input",
    ),
    "another order on another rank": (
        plan("all_reduce", [TO_ALL[0], IN_ORDER], [TO_ALL[1], IN_ORDER], [TO_ALL[2], Reduce(O, (1, 2, 0))]),
        "rank 2, step 2, end: Out(0) was combined as ((1, 0), (2, 0), (0, 0)), on rank 0 as ((0, 0), (1, 0)",
    ),
    "the same order, other brackets": (
        plan(
            "all_reduce",
            [TO_ALL[0], IN_ORDER],
            [TO_ALL[1], IN_ORDER],
            [TO_ALL[2], Reduce(T, (1, 2), own=O), Reduce(O, (0, 2), own=T)],
        ),
        "rank 2, step 3, end: Out(0) was combined as ((0, 0), ((1, 0), (2, 0))), on rank 0 as ((0, 0), (1",
    ),
    "a chunk taken for another": (
        plan("broadcast", [Send(Out(0), (1,)), Send(Out(1), (1,))], [Recv(Out(1), 0), Recv(Out(0), 0)]),
        "rank 1, step 0, Recv(Out(1), frm=0): takes chunk 0 of rank 0 for Out(1); their sizes differ",
    ),
    "two chunks mixed": (
        plan(
            "reduce_scatter",
            [Send(In(1), (1,)), Reduce(O, (0, 1), own=In(0))],
            [Send(In(0), (0,)), Reduce(O, (0, 1), own=In(0))],
        ),
        "rank 1, step 1, Reduce(Out(0), frm=(0, 1), own=In(0)): mixes block 0 with block 1",
    ),
    "a block in another's place": (
        plan(
            "all_gather",
            [Send(In(0), (1,)), Copy(Out(0), In(0)), Recv(Out(1), 1)],
            [Send(In(0), (0,)), Copy(Out(0), In(0)), Recv(Out(1), 0)],
        ),
        "rank 1, step 3, end: Out(0) lacks the contribution of rank 0",
    ),
    "the wrong block of a rank": (
        plan("scatter", [Send(In(0), (1,)), Copy(O, In(1))], [Recv(O, 0)]),
        "rank 0, step 2, end: Out(0) holds block 1, expected block 0",
    ),
    "a chunk that is forgotten": (
        all_but("all_reduce", "ring", 3, 1, 7, Recv(T, 0)),
        "rank 1, step 8, end: Out(0) lacks the contribution of rank 2",
    ),
    "an output that is never written": (
        plan(
            "all_gather",
            [Send(In(0), (1,)), Recv(Out(1), 1)],
            [Send(In(0), (0,)), Copy(Out(1), In(0)), Recv(Out(0), 0)],
        ),
        "rank 0, step 2, end: Out(0) was never written",
    ),
    "too many blocks": (
        plan("all_gather", [Copy(Out(0), In(0)), Copy(Out(1), In(1))]),
        "speaks of 2 in chunks, expected 1",
    ),
    "a reduction where nothing is reduced": (
        plan("broadcast", [Send(O, (1,))], [Reduce(O, (0, 1))]),
        "rank 1, step 0, Reduce(Out(0), frm=(0, 1)): broadcast has nothing to reduce",
    ),
    "steps for too few ranks": (Plan("barrier", "broken", 3, 0, ((), ())), "has steps for 2 ranks"),
    "deadlock through bounded edges only": (
        plan(
            "broadcast",
            [Send(O, (1,))] * MANY + [Recv(T, 1)] * MANY,
            [Copy(T, O)] + [Send(T, (0,))] * MANY + [Recv(O, 0)] * MANY,
        ),
        f"deadlock: rank 0 waits for rank 1 at step {EDGE_CAPACITY}, Send(Out(0), to=(1,))",
    ),
    "a barrier that one rank passes alone": (
        plan("barrier", [Send(O, (1,))], [Reduce(O, (0, 1))]),
        "rank 0, step 1, end: Out(0) lacks the contribution of rank 1",
    ),
    "a barrier of too few rounds": (
        plan("barrier", *[[Send(O, ((r + 1) % 3,)), Reduce(O, (r, (r - 1) % 3))] for r in range(3)]),
        "rank 0, step 2, end: Out(0) lacks the contribution of rank 1",
    ),
}


@each("name", BROKEN)
def test_prover_refuses_broken_plans(name: str) -> None:
    broken, text = BROKEN[name]
    with pytest.raises(PlanError, match=re.escape(text)) as refusal:
        prove(broken)
    assert str(refusal.value).startswith(f"{broken}: ")


@each("name", sorted(set(BROKEN) - {"a root beyond the ranks", "steps for too few ranks"}))
def test_not_lowered_either(name: str) -> None:
    with pytest.raises(PlanError):
        lower(BROKEN[name][0])


def test_room_on_the_edges_is_all_that_the_bounded_one_lacks() -> None:
    with pytest.raises(Deadlock):
        prove(BROKEN["deadlock through bounded edges only"][0])
    prove(BROKEN["deadlock through bounded edges only"][0], edge_capacity=MANY)


def test_prover_accepts_unusual_plans() -> None:
    """Sends to nobody, steps on scratch, a result combined in one odd order that all share."""
    prove(plan("broadcast", [Send(O, ()), Copy(T, O), Send(T, (1,))], [Recv(O, 0)]))
    odd = Reduce(O, (2, 0, 1))
    prove(plan("all_reduce", *[[send, odd] for send in TO_ALL]))


UNEVEN = {
    "nothing is done at all, by two": plan("all_reduce", [], []),
    "nothing is done at all, by three": plan("all_reduce", [], [], []),
    "a longer chunk copied over a shorter one": plan(
        "broadcast",
        [Send(Out(0), (1,)), Send(Out(1), (1,))],
        [Recv(Out(0), 0), Copy(Out(1), Out(0)), Recv(Out(1), 0)],
    ),
    "an own chunk of another size": plan(
        "all_reduce", [Reduce(Tmp(0), (0,), own=Out(1)), *[Reduce(Out(i), (0,)) for i in (0, 1)]]
    ),
}


@each("name", UNEVEN)
def test_empty_plans_and_chunks_of_different_sizes_are_refused(name: str) -> None:
    with pytest.raises(PlanError):
        prove(UNEVEN[name])


def flags(steps: Plan, rank: int) -> list[int]:
    """The flags of a rank's steps: 1 final (AVG divides here), 2 raw (PREMUL_SUM multiplies here)."""
    code, found = lower(steps)[rank][7:], []
    while code:
        found.append(code[1])
        code = code[8 + code[7] :]
    return found


def test_a_complete_result_is_divided_once() -> None:
    again = plan("all_reduce", [Reduce(O, (0, 1)), Send(O, (1,))], [Send(O, (0,)), Reduce(O, (0,))])
    assert [flags(again, 0), flags(again, 1)] == [[3, 12], [2, 0]]


def test_an_own_contribution_is_multiplied_once() -> None:
    alone = plan("reduce", [Reduce(O, (0, 1))], [Reduce(T, (1,), own=O), Send(T, (0,))])
    assert [flags(alone, 0), flags(alone, 1)] == [[3], [2, 0]]
