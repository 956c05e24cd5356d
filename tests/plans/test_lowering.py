"""Lowered plans: what the numbers say, that the engine takes them, and that both sides count alike."""

import os
from typing import Any

import pytest

from loops import each
from unisono import _native
from unisono.engine.operations.functions import UserOp
from unisono.engine.operations.kinds import KINDS
from unisono.engine.operations.reduction import PremulSum, ReduceOp
from unisono.errors import PlanError
from unisono.plans import (
    ALGORITHMS,
    CONTRACTS,
    Copy,
    In,
    Out,
    Plan,
    Recv,
    Reduce,
    Send,
    Tmp,
    algorithm_names,
    lower,
    make,
)
from unisono.plans.plan import Step
from unisono.plans.proof import EDGE_CAPACITY

NAMES = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective]]
SEND, RECV, REDUCE, COPY = range(4)
OUT, IN, TMP = range(3)
NONE, FINAL, RAW, LAST, OPEN = 0, 1, 2, 4, 8


@pytest.fixture
def engines() -> Any:
    """Makes the engines of all ranks of a group, in this process."""
    made: list[Any] = []

    def make_engines(size: int) -> list[Any]:
        memory = os.memfd_create("test")
        regions = [
            _native.Region(os.dup(memory) if size > 1 else -1, size, 1 << 18, rank == 0)
            for rank in range(size)
        ]
        os.close(memory)
        made.extend(
            _native.Engine(regions[rank], rank, [-1] * size, -1, 2, 0.0, 1 << 18) for rank in range(size)
        )
        return made[-size:]

    yield make_engines
    while made:
        made.pop().leave()


def header(name: str, *counts: int) -> list[int]:
    return [*counts, algorithm_names().index(name)]


def test_one_shot_as_numbers() -> None:
    """Chunks out, in, tmp; blocks; sends with zero copy; in flight; algorithm. Then opcode, flags, chunk,
    own, peers.
    """
    assert lower(make("all_reduce", "one_shot", 3))[1] == [
        *header("one_shot", 1, 0, 0, 0, 0, 1),
        *(SEND, RAW, OUT, 0, OUT, 0, -1, 2, 2, 0),
        *(REDUCE, RAW | FINAL, OUT, 0, OUT, 0, 1, 2, 0, 2),
    ]


def test_ring_as_numbers() -> None:
    """Raw is what a rank sends first and adds itself; final is only the last Reduce of a partition."""
    assert lower(make("all_reduce", "ring", 3))[0] == [
        *header("ring", 3, 0, 0, 0, 0, 3),
        *(SEND, RAW, OUT, 0, OUT, 0, -1, 1, 1),
        *(REDUCE, RAW, OUT, 2, OUT, 2, 1, 1, 2),
        *(SEND, NONE, OUT, 2, OUT, 2, -1, 1, 1),
        *(REDUCE, RAW | FINAL, OUT, 1, OUT, 1, 1, 1, 2),
        *(SEND, LAST | OPEN, OUT, 1, OUT, 1, -1, 1, 1),
        *(RECV, NONE, OUT, 0, OUT, 0, -1, 1, 2),
        *(SEND, OPEN, OUT, 0, OUT, 0, -1, 1, 1),
        *(RECV, NONE, OUT, 2, OUT, 2, -1, 1, 2),
    ]


def test_scatter_as_numbers() -> None:
    """Equal blocks; the root's input is raw; nobody else has any."""
    root, other = lower(make("scatter", "direct", 2))
    assert root == [
        *header("direct", 1, 2, 0, 1, 2, 2),
        *(SEND, RAW | LAST | OPEN, IN, 1, IN, 1, -1, 1, 1),
        *(COPY, RAW, OUT, 0, IN, 0, -1, 0),
    ]
    assert other == [*header("direct", 1, 2, 0, 1, 2, 2), *(RECV, NONE, OUT, 0, OUT, 0, -1, 1, 0)]


ZERO_COPY = 4  # the word


@each(
    ("collective", "algorithm", "size", "zero_copy"),
    [
        ("all_to_all", "pairwise", 4, 2),
        ("gather", "direct", 4, 2),
        ("broadcast", "binomial", 4, 2),
        ("broadcast", "direct", 2, 2),
        ("broadcast", "direct", 3, 1),  # a message has several receivers
        ("all_gather", "direct", 2, 2),
        ("all_gather", "direct", 4, 1),
        ("all_gather", "ring", 4, 1),  # what is sent was copied there segment by segment
        ("all_reduce", "ring", 4, 0),
    ],
)
def test_zero_copy_mode_of_a_plan(collective: str, algorithm: str, size: int, zero_copy: int) -> None:
    assert {code[ZERO_COPY] for code in lower(make(collective, algorithm, size))} == {zero_copy}


ONCE = (Recv(Out(1), 1),)


@each(
    ("before", "received", "sent", "zero_copy"),
    [
        ((), ONCE, 1, 2),
        ((), (*ONCE, Copy(Tmp(0), Out(1))), 1, 2),
        ((Copy(Out(1), In(1)),), ONCE, 1, 1),  # would be written over the message, in a later segment
        ((Copy(Out(1), In(1)), Copy(Tmp(0), Out(1))), ONCE, 1, 1),
        ((), (*ONCE, Copy(Tmp(0), Out(1)), *ONCE), 2, 1),  # would copy of the second message
        ((), (Recv(Tmp(1), 1), Copy(Out(1), Tmp(1))), 1, 1),  # scratch memory has room for a segment
        ((Copy(Tmp(1), In(1)), Send(Tmp(1), (1,))), ONCE, 1, 0),
    ],
)
def test_messages_run_ahead_only_of_what_has_nothing_to_do_with_them(
    before: tuple[Step, ...], received: tuple[Step, ...], sent: int, zero_copy: int
) -> None:
    extra = sum(isinstance(step, Send) for step in before)
    first = (Copy(Out(0), In(0)), *before, Send(In(1), (1,)), *received)
    second = (Copy(Out(1), In(1)), *sent * (Send(In(0), (0,)),), *(1 + extra) * (Recv(Out(0), 0),))
    plan = Plan("all_to_all", "mine", 2, 0, (first, second))
    assert {code[ZERO_COPY] for code in lower(plan)} == {zero_copy}


def test_sends_to_nobody_are_left_out_and_a_foreign_algorithm_is_255() -> None:
    alone = Plan("all_reduce", "mine", 1, 0, ((Send(Out(0), ()), Reduce(Out(0), (0,))),))
    assert lower(alone) == [[1, 0, 0, 0, 0, 1, 255, REDUCE, RAW | FINAL, OUT, 0, OUT, 0, 0, 0]]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 17])
def test_the_engine_takes_every_plan(engines: Any, size: int) -> None:
    ranks = engines(size)
    for collective, algorithm in NAMES:
        for root in {0, size - 1} if CONTRACTS[collective].rooted else {0}:
            for engine, code in zip(ranks, lower(make(collective, algorithm, size, root)), strict=True):
                engine.operation(code, KINDS.index(collective), 8, 0)


@each(
    ("code", "text"),
    [
        ([], "ends before number of chunks"),
        ([1, 0, 0, 0, 0, 0, 0], "messages in flight is 0"),
        ([1, 0, 0, 2, 0, 1, 0], "equal blocks is 2"),
        ([1, 0, 0, 0, 0, 1, 0, 4], "opcode is 4"),
        ([1, 0, 0, 0, 0, 1, 0, SEND, 0, OUT, 1], "chunk is 1"),
        ([1, 0, 0, 0, 0, 1, 0, SEND, 0, OUT, 0, OUT, 0, -1, 1, 7], "peer is 7"),
        ([1, 0, 0, 0, 0, 1, 0, SEND, 0, OUT, 0, OUT, 0, -1, 1, 0], "its own peer"),
        ([1, 0, 0, 0, 0, 1, 0, REDUCE, 0, OUT, 0, OUT, 0, -1, 0], "a Reduce of nothing"),
        ([1, 0, 0, 0, 0, 1, 0, RECV, 0, OUT, 0, OUT, 0, -1, 0], "one sender"),
        ([1, 0, 0, 0, 1, 1, 0, SEND, OPEN, OUT, 0, OUT, 0, -1, 1, 1], "cannot be sent with zero copy"),
        ([1, 0, 1, 0, 2, 1, 0, RECV, 0, TMP, 0, OUT, 0, -1, 1, 1], "cannot be sent with zero copy"),
    ],
)
def test_the_engine_refuses_nonsense(engines: Any, code: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        engines(2)[0].operation(code, 0, 8, 0)


def test_a_wrong_plan_is_not_lowered() -> None:
    with pytest.raises(PlanError, match="rank 1 never takes 1 of the messages"):
        lower(Plan("broadcast", "wrong", 2, 0, ((Send(Out(0), (1,)),), ())))


# ---- what Python and the engine count alike ------------------------------------------------------------


def test_an_edge_holds_what_the_prover_thinks() -> None:
    assert _native.FIFO_SLOTS == EDGE_CAPACITY


def test_reductions() -> None:
    names = _native.reduce_ops()
    assert names[: len(ReduceOp)] == [op.name for op in ReduceOp]
    assert [op.value for op in ReduceOp] == list(range(len(ReduceOp)))
    assert names[len(ReduceOp) :] == [PremulSum(1.0).name, "FUNCTION"]
    assert names[UserOp.value] == "FUNCTION"
    assert PremulSum(1.0).value == len(ReduceOp)


def test_kinds() -> None:
    assert KINDS[: len(CONTRACTS)] == tuple(CONTRACTS)
    assert len(KINDS) < 255  # the engine has a byte for it
