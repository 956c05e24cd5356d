"""`Window`: arrays that all ranks of a group read, write and update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from unisono import _native
from unisono.engine.base.validation import flag, listed
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES
from unisono.engine.operations.reduction import ReduceOp
from unisono.errors import GroupClosed

Seconds = float | timedelta | None
SUM = ReduceOp.SUM
_OPS: dict[Any, int] = {op: int(op) for op in ReduceOp if op != ReduceOp.AVG}
_OPS |= {"replace": _native.REPLACE, "no_op": _native.NO_OP}
_KINDS = {bool: "b", int: "iufc", float: "fc", complex: "c"}
"""The kinds of dtypes that hold a number of a type."""


class WindowOwner(Protocol):
    """The planner of the group whose ranks share a window."""

    name: str
    rank: int
    size: int
    timeout_s: float
    leave_callbacks: list[Callable[[], None]]

    @property
    def engine(self) -> _native.Engine:
        """Raises GroupClosed."""

    def seconds(self, timeout: Seconds) -> float:
        """A timeout in seconds."""

    def failure(self, operation: str, timeout_s: float) -> BaseException:
        """The error of what aborted the group."""


class ExposedPart(NamedTuple):
    """What a rank exposes.

    Attributes:
        cell, base: addresses in its process.  nbytes: of the memory at `base`.
        unit: the code of its dtype; -1: it exposes no array.
    """

    cell: int
    base: int
    nbytes: int
    unit: int


class Window:
    """An array of every rank, which all ranks read, write and update. Made by `Group.window`.

    The owner of an array takes no part in the calls of others: it may compute, or sleep. Offsets count
    elements of the target's array, which counts as flat. The dtype of a call is that of the target's array.

    Every call returns when its buffers may be used again. On one host it has had its effect then. Between
    hosts `put` and `accumulate` have it when `flush` returns, or `fence`, or when the lock is given back.

    Updates (`accumulate`, `fetch_and_op`, `compare_and_swap`) of an element are atomic among each other.
    `put` and `get` are not: the ranks order them with `fence`, `lock`, or `post` and `start`.

    Several threads may use it. A thread that calls the same target between hosts waits for the other one.

    Attributes:
        array: of this rank, or None.  parts: what each rank exposes.
        native: the same calls of the engine, which return a fault.
    Raises:
        ValueError, TypeError: a wrong argument; no byte has moved.
        Timeout, PeerLost, Aborted: the call failed; the group is aborted, and with it every lock is free.
    Example: with group.window(np.zeros(4)) as window:
            window.accumulate(np.ones(4), rank=0)
            window.fence()
    """

    def __init__(
        self,
        owner: WindowOwner,
        native: _native.Window,
        members: Sequence[int],
        parts: Sequence[ExposedPart],
        array: Any,
        keeps: object,
    ) -> None:
        """members: the ranks that share it.  parts: by rank.  keeps: this rank's memory, and its cell."""
        if not isinstance(native, _native.Window):
            raise TypeError("a Window is made by Group.window(array)")
        self.array = array
        self.native = native
        self._owner = owner
        self._members = members
        self.parts = parts
        self._keeps: object = keeps
        self._closed = False
        owner.leave_callbacks.append(self.end)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self._owner.rank} of {self.size}"
        return f"<Window of group {self._owner.name!r}: {state}>"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._members)

    def numel(self, rank: int) -> int:
        """How many elements the array of `rank` has; 0: it exposes none."""
        part = self._part(rank)
        return part.nbytes // ITEMSIZES[part.unit] if part.nbytes else 0

    def dtype(self, rank: int) -> np.dtype[Any] | None:
        """The dtype of the array of `rank`; None: it exposes none."""
        part = self._part(rank)
        return None if part.unit < 0 else np.dtype(DTYPES[part.unit])

    def _part(self, rank: int) -> ExposedPart:
        if rank not in self._members:
            raise ValueError(f"rank {rank} is not in this window of {self.size} ranks")
        return self.parts[rank]

    # ---- moving and updating ---------------------------------------------------------------------------

    def put(self, x: Any, rank: int, offset: int = 0, *, timeout: Seconds = None) -> None:
        """Write `x` into the array of `rank`, from element `offset` on."""
        limit_s = self._owner.timeout_s if timeout is None else self._owner.seconds(timeout)
        if self.native.put(x, rank, offset, limit_s):
            self.fail("put", limit_s)

    def get(self, out: Any, rank: int, offset: int = 0, *, timeout: Seconds = None) -> Any:
        """Read from the array of `rank`, from element `offset` on, into all of `out`; returns `out`."""
        limit_s = self._owner.timeout_s if timeout is None else self._owner.seconds(timeout)
        if self.native.get(out, rank, offset, limit_s):
            self.fail("get", limit_s)
        return out

    def accumulate(
        self, x: Any, rank: int, offset: int = 0, op: ReduceOp | str = SUM, *, timeout: Seconds = None
    ) -> None:
        """Combine `x` with the array of `rank`: a[offset + i] = a[offset + i] op x[i].

        Args:
            op: a `ReduceOp`, but not AVG; or "replace".
        """
        self._update("accumulate", x, None, rank, offset, op, timeout)

    def fetch_and_op(
        self, x: Any, rank: int, offset: int = 0, op: ReduceOp | str = SUM, *, timeout: Seconds = None
    ) -> Any:
        """As `accumulate`; returns the former elements, as an array, or for a number as a number.

        Args:
            op: also "no_op": `x` is not used, only its size and dtype.
        Example: ticket = window.fetch_and_op(1, rank=0)
        """
        operand = self._operand(x, rank)
        former = np.empty_like(operand)
        self._update("fetch_and_op", operand, former, rank, offset, op, timeout)
        return former if operand is x else former.item()

    def compare_and_swap(
        self, expected: Any, desired: Any, rank: int, offset: int = 0, *, timeout: Seconds = None
    ) -> Any:
        """If element `offset` of the array of `rank` is `expected`, make it `desired`; returns what it was.

        Equal means equal bytes: 0.0 is not -0.0, and a NaN is equal to itself.
        """
        old, new = self._operand(expected, rank), self._operand(desired, rank)
        former = np.empty_like(old)
        limit_s = self._owner.seconds(timeout)
        if self.native.swap(old, new, former, rank, offset, limit_s):
            self.fail("compare_and_swap", limit_s)
        return former if old is expected else former.item()

    def _update(
        self, name: str, x: Any, former: Any, rank: int, offset: int, op: ReduceOp | str, timeout: Seconds
    ) -> None:
        number = _OPS.get(op)
        if number is None:
            raise ValueError(f"{name}: op is {op!r}, expected one of {', '.join(map(str, _OPS))}")
        limit_s = self._owner.timeout_s if timeout is None else self._owner.seconds(timeout)
        if self.native.update(x, former, rank, offset, number, limit_s):
            self.fail(name, limit_s)

    def _operand(self, x: Any, rank: int) -> np.ndarray[Any, Any]:
        """`x`, or for a number an array of the target's dtype."""
        if isinstance(x, np.ndarray):
            return x
        dtype = self.dtype(rank)
        if dtype is None:
            raise ValueError(f"rank {rank} exposes no array")
        if dtype.kind not in _KINDS.get(type(x), ""):
            raise TypeError(f"{x!r} is no number that an array of {dtype} holds")
        try:
            return np.array((x,), dtype)
        except OverflowError:
            raise ValueError(f"{x!r} is outside of {dtype}") from None

    # ---- synchronising ---------------------------------------------------------------------------------

    def flush(self, rank: int | None = None, *, timeout: Seconds = None) -> None:
        """Wait until this rank's calls have had their effect at `rank` (None: at every rank)."""
        limit_s = self._owner.timeout_s if timeout is None else self._owner.seconds(timeout)
        if self.native.flush(rank, limit_s):
            self.fail("flush", limit_s)

    def fence(self, *, timeout: Seconds = None) -> None:
        """Wait until all ranks have called it; all calls before it have had their effect, on every rank."""
        limit_s = self._owner.seconds(timeout)
        if self.native.fence(False, limit_s):
            self.fail("fence", limit_s)

    @contextlib.contextmanager
    def lock(
        self, rank: int | None = None, shared: bool = False, *, timeout: Seconds = None
    ) -> Iterator[None]:
        """A block in which this rank has the lock of `rank` (None: of every rank, in their order).

        A lock excludes other locks, not calls without one. One rank has it alone, or several share it. The
        rank has it, not the thread: do not take one twice.

        Raises:
            Timeout: it names a rank that has the lock.
        Example: with window.lock(2): window.put(window.get(x, 2) + 1, 2)
        """
        limit_s, shared = self._owner.seconds(timeout), flag(shared, "shared")
        taken: list[int] = []
        try:
            for each in self._members if rank is None else [rank]:
                if self.native.lock(each, shared, limit_s):
                    self.fail("lock", limit_s)
                taken.append(each)
            yield
        except BaseException:
            for each in taken:
                self.native.unlock(each, limit_s)  # a fault here is not what the program has to see
            raise
        faults = [self.native.unlock(each, limit_s) for each in taken]
        if any(faults):
            self.fail("unlock", limit_s)

    def post(self, ranks: Sequence[int], *, timeout: Seconds = None) -> None:
        """Let `ranks` use this rank's array, from their `start` to their `complete`. It does not wait."""
        self._among("post", self.native.post, ranks, timeout)

    def start(self, ranks: Sequence[int], *, timeout: Seconds = None) -> None:
        """Wait until each of `ranks` has called `post` with this rank."""
        self._among("start", self.native.start, ranks, timeout)

    def complete(self, ranks: Sequence[int], *, timeout: Seconds = None) -> None:
        """Tell `ranks`, those of `start`, that this rank's calls have had their effect."""
        self._among("complete", self.native.complete, ranks, timeout)

    def wait(self, ranks: Sequence[int], *, timeout: Seconds = None) -> None:
        """Wait until each of `ranks`, those of `post`, has called `complete`."""
        self._among(
            "wait", lambda given, limit_s: self.native.completed(given, True, limit_s)[0], ranks, timeout
        )

    def test(self, ranks: Sequence[int]) -> bool:
        """Whether `wait` would return at once; True ends what `post` began, as `wait` does."""
        fault, done = self.native.completed(listed(ranks, "test: ranks"), False, 0.0)
        if fault:
            self.fail("test", 0.0)
        return done

    def _among(
        self, name: str, call: Callable[[Sequence[int], float], int], ranks: Sequence[int], timeout: Seconds
    ) -> None:
        limit_s = self._owner.seconds(timeout)
        if call(listed(ranks, f"{name}: ranks"), limit_s):
            self.fail(name, limit_s)

    # ---- memory, and the end ---------------------------------------------------------------------------

    def shared(self, rank: int) -> np.ndarray[Any, Any] | None:
        """The array of a rank of this host in this process, flat; None: it is not mapped here.

        Arrays of `unisono.empty` are mapped. What one rank stores another one sees after `fence`.
        """
        part, dtype = self._part(rank), self.dtype(rank)
        address = self.native.mapped(rank, part.base, part.nbytes) if part.nbytes else 0
        if not address or dtype is None:
            return None
        interface = {
            "data": (address, False),
            "shape": (self.numel(rank),),
            "typestr": dtype.str,
            "version": 3,
        }
        holder: Any = type("Mapped", (), {"__array_interface__": interface, "window": self})()
        return np.asarray(holder)

    @property
    def closed(self) -> bool:
        """Whether the window or its group was closed."""
        return self._closed

    def close(self, *, timeout: Seconds = None) -> None:
        """End the window; all ranks call it, and it waits for them. Then the array is this rank's alone."""
        if self.closed:
            return
        limit_s = self._owner.seconds(timeout)
        try:
            if self.native.fence(True, limit_s):
                self.fail("close", limit_s)
        finally:
            self.end()
            with contextlib.suppress(ValueError):  # the group ends, too
                self._owner.leave_callbacks.remove(self.end)

    def end(self) -> None:
        """End it here, without the other ranks. The end of its group calls this."""
        self._closed = True
        self.native.end()
        self._keeps = None

    def close_copies(self) -> None:
        """In a forked child: close its copies of connections."""
        self.native.close_copies()

    def fail(self, operation: str, limit_s: float) -> NoReturn:
        """Raise the error of a call of `native` that returned a fault."""
        if self.closed:
            raise GroupClosed(f"window.{operation} failed: this rank has closed the window or its group")
        raise self._owner.failure(f"window.{operation}", limit_s)

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it. After an exception it ends here only: the other ranks may not arrive."""
        if error is None:
            self.close()
        else:
            self.end()
