"""Values that no public callable should trip over; `arguments.py` hands each of them to each parameter."""

import datetime
import decimal
import fractions
import itertools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

import unisono as un
from unisono import _native
from unisono.engine.group import Group
from unisono.engine.group.native import NativeGroup

__all__ = ["alone", "hostile", "numbers"]

TIMEOUT_S = 600.0
"""Of a group, which no call reaches: a message that one call left behind would end the group in another."""


def alone(name: str) -> Group:
    engine = _native.Engine(_native.Region(-1, 1, 1 << 16, True), 0, [-1], -1, 1, 0.0, 1 << 18)
    return NativeGroup(engine, 0, 1, name, TIMEOUT_S, un.HashStore(0.05))


class Says:
    """An object whose special methods answer what they should not."""

    def __init__(self, **methods: Any) -> None:
        vars(self).update(methods)


def saying(name: str, answer: Any) -> Any:
    """An object with one special method. An exception is raised."""

    def method(self: Any, *_: Any, **__: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return type("Saying", (), {name: method})()


def integers() -> Iterator[Any]:
    for bits in (7, 8, 15, 16, 24, 31, 32, 53, 62, 63, 64, 65, 127, 1000):
        for sign, shift in itertools.product((1, -1), (-1, 0, 1)):
            yield sign * (1 << bits) + shift
    yield from (-2, -1, 0, 1, 2, 3, 64, True, False, np.int8(-1), np.int64(1 << 62), np.uint64((1 << 64) - 1))
    yield from (np.bool_(True), fractions.Fraction(1, 3), decimal.Decimal("NaN"), 1j, 10**400)


def floats() -> Iterator[Any]:
    yield from (float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 0.0, -0.0, 0.5, 1e10, -1.0)
    yield from (2.2e6, np.float32("nan"), np.float64("inf"), np.float16(1))
    yield from (
        datetime.timedelta.max,
        datetime.timedelta.min,
        datetime.timedelta(0),
        datetime.timedelta(seconds=-1),
    )


def texts() -> Iterator[Any]:
    yield from (
        "",
        "a",
        "\0",
        "\ud800",
        "x" * 1_000_000,
        "sum",
        "ring",
        "../..",
        "tcp://",
        "file://x",
        "1",
        "-1",
    )
    yield from (
        b"",
        b"\xff",
        b"x" * 1_000_000,
        bytearray(b"1234"),
        bytearray(),
        memoryview(b"1234"),
        "%s%n",
        "all_reduce",
    )


def arrays() -> Iterator[Any]:
    plain = np.arange(12.0)
    frozen = np.ones(4)
    frozen.flags.writeable = False
    yield from (
        plain[:0],
        plain[:4],
        plain[:5],
        plain[::2],
        plain[::-1],
        plain.reshape(3, 4).T,
        frozen,
        np.float64(1),
    )
    yield from (
        np.broadcast_to(np.zeros(1), (1 << 59,)),
        np.broadcast_to(np.zeros(1, np.int8), (1 << 31, 1 << 30)),
    )
    yield np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 40,), (0,))
    yield from (np.zeros((0, 1 << 40)), np.zeros(()), np.array([None]), np.array(["a"]), np.zeros(2, ">f8"))
    yield from (
        np.zeros(2, "M8[s]"),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, np.longdouble),
        np.zeros(2, np.uint16),
    )
    yield from ([plain[:4]], (plain[:4], plain[:4]), [plain[:4], frozen], [plain[:4], np.zeros(4, np.int8)])
    yield from ([np.zeros(1)] * 20, [plain[::2]], [[plain[:2]]], np.ma.array([1.0, 2.0], mask=[0, 1]))
    yield memoryview(np.zeros((2, 2)))[::1]


def objects() -> Iterator[Any]:
    endless: list[Any] = []
    endless.append(endless)
    yield from (None, ..., NotImplemented, object(), object, int, len, lambda *_: None, types, Exception("x"))
    yield from (
        [],
        (),
        {},
        set(),
        frozenset({1}),
        [None],
        [[]],
        [1, 2],
        [0],
        (0,),
        [0, 0],
        [-1],
        [1 << 64],
        endless,
    )
    yield from (
        {"a": 1},
        {1: 2},
        range(0),
        range(1 << 40),
        iter([0]),
        (i for i in (0, 0)),
        slice(None),
        [float("nan")],
    )
    yield from (saying("__index__", -1), saying("__index__", 1 << 70), saying("__index__", "x"))
    yield from (
        saying("__index__", ValueError("no")),
        saying("__float__", "x"),
        saying("__float__", float("nan")),
    )
    yield from (saying("__len__", 1 << 40), saying("__len__", -1), saying("__len__", ValueError("no")))
    yield from (saying("__iter__", 3), saying("__bool__", "x"), saying("__bool__", ValueError("no")))
    yield from (saying("__eq__", ValueError("no")), saying("__hash__", "x"), saying("__array__", 3))
    yield from (saying("__dlpack__", 3), saying("__dlpack__", ValueError("no")), saying("__getattr__", None))
    yield from (
        Says(__array_interface__={"shape": (9,), "typestr": "<f8", "data": (1, False), "version": 3}),
    )
    yield from (
        Says(data_ptr=8, is_contiguous=True),
        Says(__dlpack__=1),
        type("Liar", (int,), {"__index__": len})(),
    )
    yield from (
        un.SUM,
        un.AVG,
        un.BAND,
        un.premul_sum(float("nan")),
        un.SendTo(np.ones(2), 0),
        un.RecvFrom(None, 1 << 40),
    )
    yield from ([un.SendTo(np.ones(2), 7)], [un.RecvFrom(np.ones(2), 0, -5)], ["x"], [(1, 2)])


def foreign() -> Iterator[Any]:
    """Closed and foreign groups, stores and works."""
    closed = alone("closed")
    closed.close()
    other = alone("other")
    store = un.HashStore(0.01)
    store.close()
    work = other.all_reduce(np.ones(3), async_op=True)
    yield from (
        closed,
        other,
        store,
        work,
        un.HashStore(0.01),
        [other],
        other.all_reduce,
        Group,
        un.HashStore,
    )


def hostile() -> list[Any]:
    return [*integers(), *floats(), *texts(), *arrays(), *objects(), *foreign()]


def numbers() -> list[Any]:
    """Numbers that C++, struct or a socket cannot hold, and those of other types."""
    ends = [sign * (1 << bits) for bits in (16, 31, 32, 63, 64, 1000) for sign in (1, -1)]
    kinds = [True, np.bool_(True), np.int8(-1), np.int64(1 << 62), np.uint64((1 << 64) - 1), np.float32(3)]
    return [*ends, *kinds, 10**400, -(10**400), -1, 0, 2.5, float("nan"), float("inf")]
