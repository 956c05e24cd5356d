"""Wrong arguments are refused before a byte moves, and the group goes on."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ranks
import unisono as un
from loops import each


def read_only(numel: int) -> np.ndarray:
    x = np.zeros(numel, np.float32)
    x.flags.writeable = False
    return x


F = np.float32


def masked() -> Any:
    return np.ma.array([1.0, 2.0], mask=[0, 1])


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("read-only", lambda g: g.all_reduce(read_only(3)), ValueError, "read-only"),
    ("not contiguous", lambda g: g.all_reduce(memoryview(bytearray(8))[::2]), ValueError, "not contiguous"),
    ("scalar", lambda g: g.all_gather(np.float32(3), np.ones(1)), ValueError, "NumPy scalar"),
    (
        "scalar after an array of its size",
        lambda g: (g.recv(np.ones(1, F), g.rank) if g.iprobe(g.rank) else None, g.irecv(np.float32(3))),
        ValueError,
        "NumPy scalar",
    ),
    ("not an array", lambda g: g.all_reduce([1, 2, 3]), TypeError, "is a list"),
    ("object dtype", lambda g: g.all_reduce(np.array([None])), TypeError, "Python objects"),
    ("unsigned 32 bit", lambda g: g.all_reduce(np.zeros(3, np.uint32)), TypeError, "moved, not reduced"),
    ("foreign byte order", lambda g: g.all_reduce(np.zeros(3, ">f4")), TypeError, "byte order|format"),
    ("integer mean", lambda g: g.all_reduce(np.zeros(3, np.int32), un.AVG), TypeError, "AVG has no meaning"),
    ("bits of floats", lambda g: g.all_reduce(np.zeros(3), un.BXOR), TypeError, "BXOR has no meaning"),
    ("order of complex", lambda g: g.all_reduce(np.zeros(3, complex), un.MAX), TypeError, "no order"),
    ("no operation", lambda g: g.all_reduce(np.zeros(3), "sum"), (TypeError, AttributeError), "op|value"),
    ("masked", lambda g: g.all_reduce(masked()), TypeError, r"x\.filled\(value\)"),
    ("masked input", lambda g: g.all_gather(masked()), TypeError, "mask would be lost"),
    ("masked in a list", lambda g: g.all_reduce_coalesced([np.zeros(2), masked()]), TypeError, "mask would"),
    ("masked block", lambda g: g.all_to_all([np.zeros(2), masked()], np.zeros(4)), TypeError, "mask would"),
    ("masked message", lambda g: g.send(masked(), 1 - g.rank), TypeError, "send: x is a MaskedArray"),
    ("masked receive", lambda g: g.irecv(masked(), 1 - g.rank), TypeError, "irecv: x is a MaskedArray"),
    ("16 bits unsigned", lambda g: g.reduce(np.zeros(3, np.uint16)), TypeError, "viewed as int16"),
    ("structured", lambda g: g.all_reduce(np.zeros(3, "i4,f4")), TypeError, "moved as its bytes"),
    ("strided", lambda g: g.recv(memoryview(bytearray(4))[::2], g.rank), ValueError, "not contiguous"),
    ("names of operations", lambda g: g.all_reduce(np.zeros(3), "max"), TypeError, r"un\.MAX.*premul_sum"),
    ("no number", lambda g: g.broadcast(np.zeros(3), "0"), TypeError, "the root is '0'"),
    ("no plain data", lambda g: g.all_gather_object(object()), TypeError, "all_gather_object: cannot encode"),
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
    ("no array to allocate like", lambda g: g.all_gather(b"ab"), TypeError, "no output"),
    ("out elsewhere", lambda g: g.gather(np.zeros(2), np.zeros(4), 1 - g.rank), ValueError, "is not dst"),
    ("no inputs at the root", lambda g: g.scatter(np.zeros(2), None, g.rank), ValueError, "needs inputs="),
    ("mean of a prefix", lambda g: g.scan(np.zeros(2), un.AVG), ValueError, "no meaning for a prefix"),
]


@each(("call", "error", "text"), [w[1:] for w in WRONG])
def test_wrong_arguments_are_refused_and_the_group_goes_on(call: Any, error: Any, text: str) -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(error, match=text):
            call(group)
        x = np.array([group.rank + 1.0])
        group.all_reduce(x)
        assert x[0] == 3

    ranks.threads(2, work)


def test_a_root_may_be_one_of_numpys_integers() -> None:
    def work(group: un.Group) -> None:
        x = np.array([group.rank + 1.0])
        group.broadcast(x, np.int64(1))
        assert x[0] == 2
        group.reduce(x, np.argmax([4, 3]))
        assert x[0] == (2 if group.rank else 4)

    ranks.threads(2, work)


def frozen(*shape: int) -> np.ndarray:
    x = np.zeros(shape)
    x.flags.writeable = False
    return x


READ_ONLY = {
    "all_reduce": lambda g: g.all_reduce(frozen(2)),
    "broadcast": lambda g: g.broadcast(frozen(2), 1 - g.rank),
    "reduce": lambda g: g.reduce(frozen(2), g.rank),
    "scan": lambda g: g.scan(frozen(2)),
    "exclusive_scan": lambda g: g.exclusive_scan(frozen(2)),
    "all_gather": lambda g: g.all_gather(frozen(2, 2), np.zeros(2)),
    "all_gather_v": lambda g: g.all_gather_v([np.zeros(2), frozen(2)], np.zeros(2)),
    "gather": lambda g: g.gather(np.zeros(2), frozen(2, 2), g.rank),
    "scatter": lambda g: g.scatter(frozen(2), np.zeros((2, 2)), g.rank),
    "reduce_scatter": lambda g: g.reduce_scatter(frozen(2), np.zeros((2, 2))),
    "all_to_all": lambda g: g.all_to_all([frozen(1), np.zeros(1)], np.zeros(2)),
    "recv": lambda g: g.recv(frozen(2), 1 - g.rank),
    "irecv": lambda g: g.irecv(frozen(2), 1 - g.rank),
    "sendrecv": lambda g: g.sendrecv(np.zeros(2), 1 - g.rank, frozen(2), 1 - g.rank),
    "all_reduce_coalesced": lambda g: g.all_reduce_coalesced([np.zeros(2), frozen(2)]),
    "broadcast_coalesced": lambda g: g.broadcast_coalesced([frozen(2)], 1 - g.rank),
    "all_gather_coalesced": lambda g: g.all_gather_coalesced([frozen(2, 2)], [np.zeros(2)]),
    "reduce_scatter_coalesced": lambda g: g.reduce_scatter_coalesced([frozen(2)], [np.zeros((2, 2))]),
}

X = np.zeros(12)
OVERLAPPING = {
    "all_gather": lambda g: g.all_gather(X[:8], X[6:10]),
    "all_gather_v": lambda g: g.all_gather_v([X[:2], X[2:4]], X[1:3]),
    "gather": lambda g: g.gather(X[:2], X[1:5], g.rank),
    "scatter": lambda g: g.scatter(X[:2], X[1:5], g.rank),
    "reduce_scatter": lambda g: g.reduce_scatter(X[:2], X[1:5]),
    "all_to_all": lambda g: g.all_to_all(X[:4], X[2:6]),
    "all_gather_coalesced": lambda g: g.all_gather_coalesced([X[:4], X[4:8]], [X[8:10], X[0:2]]),
}

SHORT_LISTS = {
    "all_gather": lambda g: g.all_gather([np.zeros(1)], np.zeros(1)),
    "all_gather_v": lambda g: g.all_gather_v([np.zeros(1)], np.zeros(1)),
    "gather": lambda g: g.gather(np.zeros(1), [np.zeros(1)], g.rank),
    "scatter": lambda g: g.scatter(np.zeros(1), [np.zeros(1)], g.rank),
    "reduce_scatter": lambda g: g.reduce_scatter(np.zeros(1), [np.zeros(1)]),
    "all_to_all": lambda g: g.all_to_all(np.zeros(2), [np.zeros(1)]),
}


@each(
    ("calls", "text"),
    [(READ_ONLY, "is read-only"), (OVERLAPPING, "overlap"), (SHORT_LISTS, "1 arrays, expected 2")],
)
def test_every_call_refuses_them_by_its_name(calls: dict[str, Any], text: str) -> None:
    def work(group: un.Group) -> None:
        for name, call in calls.items():
            with pytest.raises(ValueError, match=rf"^{name}: .*{text}"):
                call(group)
        x = np.ones(1)
        group.sendrecv(x.copy(), 1 - group.rank, x, 1 - group.rank)
        group.all_reduce(x)
        assert (x[0], group.sequence) == (2, 1)

    ranks.threads(2, work)


class Exporter:
    """Something that is known by DLPack alone."""

    def __init__(self, array: np.ndarray, copies: bool) -> None:
        self.array, self.copies = array, copies

    def __dlpack__(self, **options: Any) -> Any:
        return (self.array.copy() if self.copies else self.array).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_dlpack_exporters_that_copy_are_recognised() -> None:
    def work(group: un.Group) -> None:
        x = np.ones(3)
        group.all_reduce(Exporter(x, copies=False))
        assert (x == 2).all()
        for call in (group.all_reduce, lambda y: group.all_gather(np.zeros((2, 3)), y)):
            with pytest.raises(ValueError, match="x is a Exporter, which hands out copies of itself"):
                call(Exporter(x, copies=True))

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


def test_a_result_is_allocated_of_what_can_be_sent_only() -> None:
    endless = np.broadcast_to(np.zeros(1), 2**59)

    def work(group: un.Group) -> None:
        for call in (group.all_gather, group.all_to_all, group.reduce_scatter):
            with pytest.raises(TypeError, match="got memoryview and no output"):
                call(memoryview(np.zeros(2)))
            with pytest.raises(MemoryError, match="Unable to allocate"):
                call(endless)
        with pytest.raises(MemoryError, match="Unable to allocate"):
            group.gather(endless, dst=group.rank)

    ranks.threads(1, work)


@each("backend", [1, b"native", np.zeros(2), ["native"]])
def test_a_backend_is_text(backend: Any) -> None:
    with pytest.raises(TypeError, match="backend"):
        un.init_process_group(backend, store=un.HashStore(1.0), rank=0, world_size=1)
