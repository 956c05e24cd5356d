"""mpi4py.util.sync: ranks that go one after another, counters, mutexes, conditions and semaphores.

Their state is numbers in a window of rank 0, which others read and change without its help. A rank that waits
reads with growing pauses, at most MOST_PAUSE_S. Tickets keep the order: who comes first is served first.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

from unisono import MPI

__all__ = ["Condition", "Counter", "Mutex", "Semaphore", "Sequential"]

MOST_PAUSE_S = 0.001


class _Held:
    """An object whose `with` takes it and gives it back."""

    def __enter__(self) -> Any:
        self.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()

    acquire: Callable[..., Any]
    release: Callable[..., Any]


class Sequential(_Held):
    """The body of `with Sequential(comm):` runs on one rank after another."""

    def __init__(self, comm: Any, tag: int = 0) -> None:
        self.comm, self.tag = comm, int(tag)

    def begin(self) -> None:
        """Wait for the rank before this one."""
        if self.comm.Get_rank() > 0:
            self.comm.Recv([bytearray(), 0, MPI.BYTE], self.comm.Get_rank() - 1, self.tag)

    def end(self) -> None:
        """Let the next rank begin."""
        if self.comm.Get_rank() < self.comm.Get_size() - 1:
            self.comm.Send([bytearray(), 0, MPI.BYTE], self.comm.Get_rank() + 1, self.tag)

    acquire, release = begin, end


class _Numbers:
    """Numbers in the window of one rank; every operation is atomic."""

    def __init__(self, start: list[Any], code: str, comm: Any, info: Any, root: int, name: str) -> None:
        self._code, self._root, self._name = code, root, name
        unit = MPI.Datatype.fromcode(code).Get_size()
        at_root = comm.Get_rank() == root
        self._window = MPI.Win.Allocate(unit * len(start) if at_root else 0, unit, info, comm)
        if at_root:
            self._window.Lock(root, MPI.LOCK_SHARED)
            self._window.Accumulate(array(code, start), root, op=MPI.REPLACE)
            self._window.Unlock(root)
        comm.Barrier()

    def window(self) -> Any:
        """The window.

        Raises:
            RuntimeError: it is freed.
        """
        if not self._window:
            raise RuntimeError(f"{self._name} already freed")
        return self._window

    def add(self, index: int, value: Any) -> Any:
        """Add to a number; its value before. 0: read it."""
        return self._call(MPI.Win.Fetch_and_op, [value, 0], index, MPI.SUM if value else MPI.NO_OP)

    def exchange(self, index: int, expected: Any, value: Any) -> bool:
        """Set a number if it has the expected value; whether it had."""
        return bool(self._call(MPI.Win.Compare_and_swap, [value, expected, 0], index) == expected)

    def _call(self, call: Callable[..., None], numbers: list[Any], *args: Any) -> Any:
        """A call of the window with these numbers; it replaces the last one, which is returned."""
        given, window = [array(self._code, [one]) for one in numbers], self.window()
        window.Lock(self._root, MPI.LOCK_SHARED)
        call(window, *given, self._root, *args)
        window.Unlock(self._root)
        return given[-1][0]

    def wait_for(self, index: int, least: int) -> None:
        """Wait until a number is at least `least`."""
        pause_s = 0.0
        while self.add(index, 0) < least:
            time.sleep(pause_s)
            pause_s = min(MOST_PAUSE_S, max(MOST_PAUSE_S / 1024, 2 * pause_s))

    def free(self) -> None:
        """Free the window; all ranks call it."""
        window, self._window = self._window, MPI.WIN_NULL
        window.free()


class Counter:
    """A number of rank `root` that all ranks increment: `next(counter)` gives each value once."""

    def __init__(
        self, start: Any = 0, step: Any = 1, *, typecode: str = "i", comm: Any = MPI.COMM_SELF,
        info: Any = MPI.INFO_NULL, root: int = 0,
    ) -> None:  # fmt: skip
        code = MPI.Datatype.fromcode(typecode).typechar
        self._start, self._step, self._typechar = start, step, code
        self._numbers = _Numbers([start], code, comm, info, root, "counter")

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, incr: Any = None) -> Any:
        """Its value, before `incr` (default: the step) is added."""
        return self._numbers.add(0, self._step if incr is None else incr)

    def free(self) -> None:
        """Free it; all ranks call it."""
        self._numbers.free()


class Mutex(_Held):
    """A lock that one rank holds at a time; `recursive`: several times."""

    def __init__(
        self, *, recursive: bool = False, comm: Any = MPI.COMM_SELF, info: Any = MPI.INFO_NULL
    ) -> None:
        self._recursive, self._comm = bool(recursive), comm
        self._numbers = _Numbers([0, 0], "q", comm, info, 0, "mutex")  # tickets given, tickets served
        self._held = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Whether this rank holds it now; without `blocking` only if it was free.

        Raises:
            RuntimeError: it is held here already and not recursive, or freed.
        """
        if self.locked():
            if not self._recursive:
                raise RuntimeError("cannot acquire already held mutex")
        elif blocking:
            self._numbers.wait_for(1, self._numbers.add(0, 1))
        else:
            served = self._numbers.add(1, 0)
            if not self._numbers.exchange(0, served, served + 1):
                return False
        self._held += 1
        return True

    def release(self) -> None:
        """Release it, once for each `acquire`."""
        if not self.locked():
            raise RuntimeError("cannot release unheld mutex")
        self._held -= 1
        if not self._held:
            self._numbers.add(1, 1)

    def locked(self) -> bool:
        """Whether this rank holds it."""
        self._numbers.window()
        return self._held > 0

    def count(self) -> int:
        """How often this rank holds it."""
        self._numbers.window()
        return self._held

    def suspended(self, held: int = 0) -> int:
        """Release it wholly, or take it again as often as before; how often it was held."""
        before, self._held = self._held, held
        if held:
            self._numbers.wait_for(1, self._numbers.add(0, 1))
        else:
            self._numbers.add(1, 1)
        return before

    def free(self) -> None:
        """Free it; all ranks call it."""
        if self._numbers._window and self._held:
            self.suspended()
        self._numbers.free()


class Condition(_Held):
    """Ranks wait, and a rank notifies them, in the order of their waits; all hold the mutex meanwhile."""

    def __init__(
        self, mutex: Mutex | None = None, *, recursive: bool = True, comm: Any = MPI.COMM_SELF,
        info: Any = MPI.INFO_NULL,
    ) -> None:  # fmt: skip
        self._own = mutex is None
        self._mutex = Mutex(recursive=recursive, comm=comm, info=info) if mutex is None else mutex
        self._numbers = _Numbers([0, 0], "q", self._mutex._comm, info, 0, "condition")  # waits, notices

    def acquire(self, blocking: bool = True) -> bool:
        """Take the mutex."""
        self._numbers.window()
        return self._mutex.acquire(blocking)

    def release(self) -> None:
        """Release the mutex."""
        self._numbers.window()
        self._mutex.release()

    def locked(self) -> bool:
        """Whether this rank holds the mutex."""
        return self._mutex.locked()

    def wait(self) -> bool:
        """Release the mutex, wait for a notice, and take it again. Always True."""
        self._check("wait on")
        ticket = self._numbers.add(0, 1)
        held = self._mutex.suspended()
        self._numbers.wait_for(1, ticket + 1)
        self._mutex.suspended(held)
        return True

    def wait_for(self, predicate: Callable[[], Any]) -> Any:
        """Wait until `predicate()` is true; its value."""
        while not (result := predicate()):
            self.wait()
        return result

    def notify(self, n: int = 1) -> int:
        """Wake at most n waiting ranks; how many."""
        self._check("notify on")
        woken = int(max(0, min(n, self._numbers.add(0, 0) - self._numbers.add(1, 0))))
        self._numbers.add(1, woken)
        return woken

    def notify_all(self) -> int:
        """Wake all waiting ranks; how many."""
        return self.notify(1 << 31)

    def _check(self, what: str) -> None:
        self._numbers.window()
        if not self.locked():
            raise RuntimeError(f"cannot {what} unheld mutex")

    def free(self) -> None:
        """Free it; all ranks call it."""
        if self._own:
            self._mutex.free()
        elif self._mutex._numbers._window and self._mutex.locked():
            self._mutex.release()
        self._numbers.free()


class Semaphore(_Held):
    """At most `value` ranks hold it; `bounded`: more releases than acquires are an error."""

    def __init__(
        self, value: int = 1, *, bounded: bool = True, comm: Any = MPI.COMM_SELF, info: Any = MPI.INFO_NULL
    ) -> None:
        if value < 0:
            raise ValueError("initial value must be non-negative")
        self._bounded, self._value = bool(bounded), value
        self._counter = Counter(value, comm=comm, info=info)
        self._condition = Condition(recursive=False, comm=comm, info=info)

    def acquire(self, blocking: bool = True) -> bool:
        """Whether this rank holds it now; without `blocking` only if it was free."""
        with self._condition:
            while self._counter.next(0) == 0:
                if not blocking:
                    return False
                self._condition.wait()
            self._counter.next(-1)
            return True

    def release(self, n: int = 1) -> None:
        """Let n more ranks hold it."""
        if n < 1:
            raise ValueError("increment must be one or more")
        with self._condition:
            if self._bounded and self._counter.next(0) + n > self._value:
                raise ValueError("semaphore released too many times")
            self._counter.next(n)
            self._condition.notify(n)

    def free(self) -> None:
        """Free it; all ranks call it."""
        self._counter.free()
        self._condition.free()
