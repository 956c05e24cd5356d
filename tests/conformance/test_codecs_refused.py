"""Codecs that ranks do not share, and wrong arguments of codecs."""

import contextlib
import threading
from typing import Any

import numpy as np
import pytest

import inside
import ranks
import unisono as un
from loops import each

MISMATCHES: list[tuple[Any, Any, str, str]] = [
    ({"codec": "bf16"}, {"codec": "int8"}, "as bf16", "as int8"),
    ({"codec": "bf16"}, {}, "float32[100] as bf16", "float32[100], SUM"),
    ({"codec": un.codecs.int8(32)}, {"codec": "int8"}, "int8(block=32)", "int8(block=64)"),
    ({"codec": "bf16"}, {"codec": "bf16", "between_hosts": True}, "on all edges", "between hosts"),
    ({"codec": "bf16"}, {"codec": "bf16", "feedback": np.zeros(100, np.float32)}, "on all edges", "feedback"),
]


def test_each_line_of_a_mismatch_has_its_codecs_block_edges_and_feedback() -> None:
    """They were two equal lines."""
    plain = {"codec": "int8", "between_hosts": False}
    fed = {"codec": un.codecs.int8(32), "between_hosts": True, "feedback": np.zeros(100, np.float32)}
    lines = {
        0: "float32[100] as int8(block=64), SUM",
        1: "as int8(block=32) between hosts with feedback, SUM",
    }

    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch) as raised:
            group.all_reduce(np.ones(100, np.float32), **(fed if group.rank else plain))
        told = [line for line in str(raised.value).splitlines() if line.startswith("  rank ")]
        assert all(lines[rank] in line for rank, line in enumerate(told)), told
        assert len(told) == 2

    for where in ({}, {"per_host": 1}):
        ranks.threads(2, work, **where)


@each("one, other, first, second", MISMATCHES)
def test_ranks_with_different_codecs(one: Any, other: Any, first: str, second: str) -> None:
    def work(group: un.Group) -> None:
        x = np.ones(100, np.float32)
        with pytest.raises(un.Mismatch) as raised:
            group.all_reduce(x, **(other if group.rank else one))
        assert first in str(raised.value)
        assert second in str(raised.value)
        assert (x == 1).all()

    ranks.threads(2, work)


def test_messages_of_different_codecs() -> None:
    def work(group: un.Group) -> None:
        x = np.ones(100, np.float32)
        if group.rank == 0:
            group.send(x, 1, codec=un.codecs.int8(32))
            return
        with pytest.raises(
            un.Mismatch, match=r"116 bytes of int8\(block=32\).*108 bytes of int8\(block=64\)"
        ):
            group.recv(x, 0, codec="int8")
        assert (x == 1).all()

    ranks.threads(2, work)


def wrong(group: un.Group) -> dict[str, Any]:
    x, kept = np.ones(8, np.float32), np.zeros(8, np.float32)
    below = -(np.arange(9) == 7).astype(np.float32)
    frozen = kept.copy()
    frozen.setflags(write=False)
    return {
        "codec is a int": lambda: group.all_reduce(x, codec=8),
        "codec 'lz4' is not one of": lambda: group.all_reduce(x, codec="lz4"),
        "takes float32, got int32": lambda: group.all_reduce(x.view(np.int32), codec="bf16"),
        "takes float32, got float64": lambda: group.all_reduce(1.5, codec="bf16"),
        "without codec=": lambda: group.all_reduce(x, feedback=kept),
        "between_hosts is a int": lambda: group.all_reduce(x, codec="bf16", between_hosts=1),
        r"x\[7\] is -1.0": lambda: group.all_reduce(below, codec="u0610"),
        r"inputs\[7\] is -1.0": lambda: group.all_to_all(below, codec="u0610"),
        "feedback has 7 elements": lambda: group.all_reduce(x, codec="bf16", feedback=kept[:7]),
        "feedback is float64": lambda: group.all_reduce(x, codec="bf16", feedback=kept.astype(float)),
        "feedback is read-only": lambda: group.all_reduce(x, codec="bf16", feedback=frozen),
        "feedback is a str": lambda: group.all_reduce(x, codec="bf16", feedback="all"),
        "overlap in memory": lambda: group.all_reduce(x, codec="bf16", feedback=x),
        "makes numbers below zero": lambda: group.all_reduce(x, codec="u0610", feedback=kept),
        "a negative factor": lambda: group.all_reduce(x, un.premul_sum(-1), codec="u0610"),
        "reproducible=True": lambda: group.all_reduce(x, codec="bf16", reproducible=True),
        "needs max_error=": lambda: group.all_reduce(x, codec="auto"),
        "is for codec='auto'": lambda: group.all_reduce(x, codec="bf16", max_error=0.1),
        "max_error is -1": lambda: group.all_reduce(x, codec="auto", max_error=-1),
        "encodes a partial result": lambda: group.all_reduce(x, codec="bf16", algorithm="leaders"),
        "passes on what came as codes": lambda: group.broadcast(x, codec="int8", algorithm="linear"),
        "feedback is refused.*passes on": lambda: group.broadcast(
            x, codec="bf16", feedback=kept, algorithm="linear"
        ),
        "MAX is none": lambda: group.all_reduce(x, un.MAX, codec="bf16", feedback=kept),
        "needs a named algorithm": lambda: group.all_reduce(x, codec="bf16", algorithm=lambda *_: ()),
        "x is read-only": lambda: group.broadcast(frozen, group.rank, codec="bf16"),
        "send: codec is a int": lambda: group.send(x, 0, codec=3),
        "send: x is int32": lambda: group.send(x.view(np.int32), 0, codec="bf16"),
        r"send: x\[0\] is -1.0": lambda: group.send(-x, 0, codec="u0610"),
        "no codec; all_reduce": lambda: group.error_bound("scan", 1.0, "bf16"),
    }


def test_wrong_arguments_are_told_before_a_byte_moves() -> None:
    def work(group: un.Group) -> None:
        inside.place(group, (0, 1, 2))
        for text, call in wrong(group).items():
            with pytest.raises((TypeError, ValueError), match=text):
                call()
        x = np.ones(8, np.float32)
        for call in (group.all_reduce, group.all_gather):  # in place; with an allocated result
            for value in (1.0, 1.0, -1.0):  # remembered, and then with a number below zero
                with pytest.raises(ValueError, match="is -1") if value < 0 else contextlib.nullcontext():
                    x[:] = value
                    call(x, codec="u0610")
        group.barrier()

    ranks.threads(3, work)


def test_a_number_below_zero_that_comes_during_the_call_is_told_to_all() -> None:
    changed = threading.Event()

    def work(group: un.Group) -> str:
        x = np.ones(64, np.float32)
        if group.rank == 0:
            group.barrier(async_op=True)  # the next call is not begun before rank 1 is there
            reducing = group.all_reduce(x, codec="u0610", between_hosts=False, async_op=True)
            x[:] = -1
            changed.set()
        else:
            changed.wait()
            group.barrier()
            reducing = group.all_reduce(x, codec="u0610", between_hosts=False, async_op=True)
        with pytest.raises(un.Aborted) as caught:
            reducing.wait()
        return str(caught.value)

    for text in ranks.threads(2, work):
        assert "rank 0 aborted the group because of a number below zero" in text
