"""Wrong arguments are refused before a byte moves, and the group goes on."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ranks
import unisono as un


def read_only(numel: int) -> np.ndarray:
    x = np.zeros(numel, np.float32)
    x.flags.writeable = False
    return x


F = np.float32
WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("read-only", lambda g: g.all_reduce(read_only(3)), ValueError, "read-only"),
    ("not contiguous", lambda g: g.all_reduce(np.zeros((4, 4))[:, 1]), ValueError, "not contiguous"),
    ("scalar", lambda g: g.all_reduce(np.float32(3)), ValueError, "NumPy scalar"),
    (
        "scalar after an array of its size",
        lambda g: (g.all_reduce(np.ones(1, F)), g.all_reduce(np.float32(3))),
        ValueError,
        "NumPy scalar",
    ),
    ("not an array", lambda g: g.all_reduce([1, 2, 3]), TypeError, "is a list"),
    ("object dtype", lambda g: g.all_reduce(np.array([None])), TypeError, "dtype|format"),
    ("unsigned 32 bit", lambda g: g.all_reduce(np.zeros(3, np.uint32)), TypeError, "format|dtype"),
    ("foreign byte order", lambda g: g.all_reduce(np.zeros(3, ">f4")), TypeError, "byte order|format"),
    ("integer mean", lambda g: g.all_reduce(np.zeros(3, np.int32), un.AVG), TypeError, "AVG has no meaning"),
    ("bits of floats", lambda g: g.all_reduce(np.zeros(3), un.BXOR), TypeError, "BXOR has no meaning"),
    ("order of complex", lambda g: g.all_reduce(np.zeros(3, complex), un.MAX), TypeError, "no order"),
    ("no operation", lambda g: g.all_reduce(np.zeros(3), "sum"), (TypeError, AttributeError), "op|value"),
    ("no such root", lambda g: g.broadcast(np.zeros(3), 2), ValueError, "rank 2 is not in group"),
    (
        "no such algorithm",
        lambda g: g.all_reduce(np.zeros(3), algorithm="best"),
        ValueError,
        "no algorithm 'best'",
    ),
    ("no such timeout", lambda g: g.all_reduce(np.zeros(3), timeout=-1), ValueError, "positive"),
    (
        "short list",
        lambda g: g.reduce_scatter(np.zeros(2), [np.zeros(2)]),
        ValueError,
        "1 arrays, expected 2",
    ),
    ("long list", lambda g: g.all_gather([np.zeros(1)] * 3, np.zeros(1)), ValueError, "3 arrays, expected 2"),
    ("wrong size", lambda g: g.all_gather(np.zeros((2, 3)), np.zeros(2)), ValueError, "has 3 elements"),
    ("no even cut", lambda g: g.all_to_all(np.zeros(3), np.zeros(3)), ValueError, "cannot be cut"),
    ("two dtypes", lambda g: g.all_gather(np.zeros((2, 3), F), np.zeros(3)), ValueError, "must agree"),
    (
        "dtypes in a list",
        lambda g: g.all_gather([np.zeros(1), np.zeros(1, F)], np.zeros(1)),
        ValueError,
        "share",
    ),
    ("overlap", lambda g: (lambda x: g.all_to_all(x[:4], x[2:6]))(np.zeros(8)), ValueError, "overlap"),
    (
        "other's block",
        lambda g: (lambda x: g.all_gather(x, x[1 - g.rank]))(np.zeros((2, 3))),
        ValueError,
        "overlap",
    ),
    ("no out at the root", lambda g: g.gather(np.zeros(2), None, g.rank), ValueError, "needs out="),
    ("out elsewhere", lambda g: g.gather(np.zeros(2), np.zeros(4), 1 - g.rank), ValueError, "is not dst"),
    ("no inputs at the root", lambda g: g.scatter(np.zeros(2), None, g.rank), ValueError, "needs inputs="),
    ("mean of a prefix", lambda g: g.scan(np.zeros(2), un.AVG), ValueError, "no meaning for a prefix"),
]


@pytest.mark.parametrize(("call", "error", "text"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_arguments_are_refused_and_the_group_goes_on(call: Any, error: Any, text: str) -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(error, match=text):
            call(group)
        x = np.array([group.rank + 1.0])
        group.all_reduce(x)
        assert x[0] == 3

    ranks.threads(2, work)


def test_bfloat16_of_ml_dtypes_is_known() -> None:
    def work(group: un.Group) -> None:
        x = np.full(3, 1.5, ml_dtypes.bfloat16)
        group.all_reduce(x)
        assert (x == 3).all()
        with pytest.raises(TypeError, match="float8"):
            group.all_reduce(np.zeros(3, ml_dtypes.float8_e4m3fn))

    ranks.threads(2, work)


def test_read_only_inputs_are_fine_where_nothing_is_written() -> None:
    def work(group: un.Group) -> None:
        x = np.arange(3, dtype=np.float32)
        x.flags.writeable = False
        out = np.zeros((2, 3), np.float32)
        group.all_gather(out, x)
        group.broadcast(x if group.rank == 0 else out[0], 0)
        group.reduce(x if group.rank == 1 else out[0], 0)
        assert (out[0] == (2 * x if group.rank == 0 else x)).all()

    ranks.threads(2, work)


def test_closed_group_says_so() -> None:
    def work(group: un.Group) -> None:
        group.all_reduce(np.zeros(1))
        group.barrier()
        group.close()
        group.close()
        with pytest.raises(un.GroupClosed, match="was closed"):
            group.all_reduce(np.zeros(1))
        with pytest.raises(un.GroupClosed):
            group.send(np.zeros(1), 0)

    ranks.threads(2, work)
