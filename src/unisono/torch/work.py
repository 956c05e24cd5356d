"""What an asynchronous collective returns to PyTorch: `UnisonoWork`, and its future.

`wait()` waits on the engine's own Work, in the calling thread, with the GIL released. A future is made
only when PyTorch asks for one (DDP does): `WorkFutures` completes it from a Python thread of the group, which
waits in the engine and takes the GIL only to set a result. The engine's progress thread never does.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from unisono._native import call_each, outcome, stop_threads_at_the_end
from unisono.engine.base.limits import replaced_threads
from unisono.engine.diagnosis import except_hook
from unisono.errors import UnisonoError, message
from unisono.torch_internals import autograd
from unisono.torch_internals.c10d import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

PATIENCE_S = 5.0  # how long closing waits for the threads of futures

stop_threads_at_the_end()

# mypy must pass with and without PyTorch installed.
# mypy: disallow-subclassing-any=False, warn-unused-ignores=False


class EngineWork(Protocol):
    """The part of `unisono.Work` that is used here."""

    def wait(self, timeout: float | None = None) -> None:
        """Block until complete; raise its error."""

    def done(self) -> bool:
        """Say whether it is complete."""

    def exception(self) -> BaseException | None:
        """Return its error; None if it has none or is still under way."""


def seconds(timeout: timedelta | None) -> float | None:
    """Convert PyTorch's timeouts: None, zero and negative values mean the default.

    Example: timedelta(milliseconds=1500) -> 1.5, timedelta(milliseconds=-1) -> None.
    """
    return None if timeout is None or timeout.days < 0 or not timeout else timeout.total_seconds()


class UnisonoWork(Work):
    """A `torch.distributed.Work` over an engine's Work.

    `after` runs once, in the thread that first sees the completion: it copies results back
    into outputs that are not contiguous.
    """

    __slots__ = ("_after", "_futures", "_lock", "_native", "outputs")

    ordered = True  # completes after the works issued before it

    def __init__(
        self,
        native: EngineWork,
        result: list[torch.Tensor],
        futures: WorkFutures,
        after: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._native = native
        self.outputs = result
        self._futures = futures
        self._after = after
        self._lock = threading.RLock() if after else None  # a signal handler may wait for the same work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until complete. Raises PeerLost, Timeout or Mismatch as the engine does."""
        self._native.wait(seconds(timeout))
        if self._after:
            self._finish()
        return True

    def synchronize(self) -> None:
        """Wait: CPU tensors have no stream to order against."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait: CPU tensors have no stream to block."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is complete, with or without an error. Does not block."""
        if not self._native.done():
            return False
        if self._after and self.exception() is None:
            self._finish()
        return True

    def is_success(self) -> bool:
        """Whether it is complete without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return its error, or None."""
        try:
            return self._native.exception()
        except UnisonoError as error:  # the group was closed
            return error

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors, after waiting for them."""
        self.wait()
        return self.outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the output tensors; made now, and complete at once if the work is.

        PyTorch turns the error of a future into a RuntimeError. In a backward pass of DDP this method raises
        the original error, before DDP reads the future.
        """
        caller = sys._getframe().f_back
        if _is_fp16_compress(self, caller):
            return cast("torch.futures.Future[list[torch.Tensor]]", _as_cpp_makes_it(self))
        if autograd.from_ddp(caller):
            autograd.after_backward(self.synchronize)
        return self._futures.of(self)

    def _get_sequence_number(self) -> int:
        """Return its number among the group's collectives, from 1; the same on every rank.

        Raises:
            NotImplementedError: messages and calls that are several collectives have no number.
        """
        number: int | None = getattr(self._native, "number", None)
        if number is None:
            raise NotImplementedError("only a Work of one collective has a sequence number")
        return number

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {_state(self)}{_named(self.outputs)}>"

    def _finish(self) -> None:
        with self._lock:  # type: ignore[union-attr]
            if self._after:
                self._after()
            self._after = None


class TransferWork(UnisonoWork):
    """A send or a receive. They complete in any order."""

    ordered = False

    def source_rank(self) -> int:
        """Return the group rank that sent."""
        self.wait()
        source: int = self._native.source  # type: ignore[attr-defined]
        return source

    _source_rank = source_rank


class CoalescedWork:
    """Several works of one group as one: complete when all are. They complete in issue order."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[UnisonoWork]) -> None:
        self._works = works

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all; `timeout` is for the whole."""
        if timeout is None:
            for work in self._works:
                work.wait()
            return
        deadline = time.monotonic() + timeout
        for work in self._works:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def done(self) -> bool:
        """Say whether all are complete."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the first error."""
        return next((error for error in (work.exception() for work in self._works) if error), None)


def _is_fp16_compress(work: UnisonoWork, caller: FrameType | None) -> bool:
    """Whether DDP's built-in FP16_COMPRESS asks: for float16, and from C++ in a backward pass."""
    if not work.outputs or work.outputs[0].dtype is not torch.float16:
        return False
    return autograd.from_backward(caller)


def _as_cpp_makes_it(work: UnisonoWork) -> Any:
    """Return a completed future whose value is a list of tensors also in C++.

    FP16_COMPRESS accepts no other. PyTorch takes the type from an existing value, so this waits for the work.
    """
    work.wait()
    return autograd.future_in_cpp(lambda: work.outputs)


def _state(work: UnisonoWork) -> str:
    if not work._native.done():
        return "under way"
    error = work.exception()
    return f"failed with {type(error).__name__}" if error else "complete"


def _named(outputs: list[torch.Tensor]) -> str:
    """Describe the first output. [3, 4] of float32 and one more -> ", float32[3, 4] and 1 more"."""
    if not outputs:
        return ""
    shown = f"{str(outputs[0].dtype).removeprefix('torch.')}{list(outputs[0].shape)}"
    return f", {shown}" + (f" and {len(outputs) - 1} more" if len(outputs) > 1 else "")


class _CompletedTorchWork(Work):
    """The Work of every synchronous call: complete from the beginning."""

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        return True

    def synchronize(self) -> None:
        pass

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[torch.Tensor]:
        return []

    def __repr__(self) -> str:
        return "<Work: complete when it was made>"

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


DONE = _CompletedTorchWork()


class CompletedReceive(_CompletedTorchWork):
    """The Work of a receive that had ended when it was called, until then unknown to the caller.

    Before the caller asks, a send of the same memory is refused: see csrc/p2p/receive_buffers.hpp.

    Args:
        see: tells the engine that the caller has asked.
    """

    def __init__(self, see: Callable[[], object]) -> None:
        super().__init__()
        self._see = see

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        self._see()
        return True

    synchronize = block_current_stream = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        self._see()
        return True

    is_success = is_completed

    def result(self) -> list[torch.Tensor]:
        self._see()
        return []

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self._see()
        return super().get_future()


class WorkFutures:
    """Makes and completes the futures of one group's works.

    One thread waits for one work after another: collectives complete in issue order. Completing a future runs
    its callbacks, which may wait for further works, as in PowerSGD. So before that another thread takes over
    the waiting; it is started if there is none. Point-to-point works complete in any order (`ordered =
    False`): each future of theirs gets a thread of its own. PyTorch does not make such futures in a loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._items: deque[tuple[UnisonoWork, Callable[[], object]]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._has_waiter = False  # a thread waits for a work
        self._closing = False

    def of(self, work: UnisonoWork) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of `work`; made now, and complete at once if the work is.

        An error must reach a caller that waits in C++. So it must be an error of the future, not a value: a
        callback raises it. PyTorch turns it into a RuntimeError whose text lists all Python frames below the
        callback. So the callback here is native, and so is the code that runs the callbacks of others.

        Raises:
            RuntimeError: another package has replaced Python's threads.
        """
        _refuse_replaced_threads()
        start: torch.futures.Future[None] = torch.futures.Future()
        future: torch.futures.Future[list[torch.Tensor]] = start.then(
            cast("Callable[[Any], list[torch.Tensor]]", partial(outcome, partial(_outcome, work)))
        )
        complete = partial(autograd.set_result, start)
        if work.is_completed():
            complete()
        else:
            self.call_when_done(work, complete)
        return future

    def call_when_done(self, work: UnisonoWork, complete: Callable[[], object]) -> None:
        """Call `complete` once `work` is done, with or without an error; always in another thread.

        Raises:
            RuntimeError: another package has replaced Python's threads.
        """
        _refuse_replaced_threads()
        if work.ordered:
            with self._changed:
                self._items.append((work, complete))
                self._wake_or_start_thread()
        else:
            self._thread(_completion(work, complete)).start()

    def close(self) -> None:
        """Complete all remaining futures and end the threads. Call it when every work is sure to complete.

        Later works are completed, too. The wait is limited: a signal handler may call this while its own
        thread starts one of the threads and holds the lock that they need. The threads then end later.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            threads, self._threads = self._threads, []
        deadline = time.monotonic() + PATIENCE_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _wake_or_start_thread(self) -> None:
        """Make a thread take the next item. Called with the lock held."""
        if self._has_waiter or not self._items:
            return
        if self._idle:
            self._changed.notify()
            return
        thread = self._thread(self._completions())
        thread.start()
        self._threads.append(thread)

    def _thread(self, completions: Iterator[Callable[[], object]]) -> threading.Thread:
        return threading.Thread(target=call_each, args=(completions,), name=self._name, daemon=True)

    def _next(self) -> tuple[UnisonoWork, Callable[[], object]] | None:
        with self._changed:
            self._idle += 1
            try:
                while self._has_waiter or not self._items:
                    if self._closing and not self._items:
                        return None
                    self._changed.wait()
                self._has_waiter = True
                return self._items.popleft()
            finally:
                self._idle -= 1

    def _completions(self) -> Iterator[Callable[[], object]]:
        """Yield the function that completes each future, when its work is done."""
        while item := self._next():
            work, complete = item
            _wait_out(work)
            with self._changed:
                self._has_waiter = False
                with suppress(RuntimeError, MemoryError):  # no new thread: this one continues
                    self._wake_or_start_thread()
            yield complete
            del item, work, complete  # a work keeps its tensors alive


def _refuse_replaced_threads() -> None:
    """Refuse the threads of gevent: the one that waits in C++ would never begin."""
    if package := replaced_threads():
        raise RuntimeError(
            message(
                "a future of a Work needs a thread of the system",
                observed=f"{package} has replaced Python's threads",
                remedy="Call work.wait(), or patch with thread=False.",
            )
        )


def _completion(work: UnisonoWork, complete: Callable[[], object]) -> Iterator[Callable[[], object]]:
    _wait_out(work)
    yield complete


def _wait_out(work: UnisonoWork) -> None:
    with suppress(Exception):  # the thread that completes the future raises it again
        work.wait()


def _outcome(work: UnisonoWork) -> list[torch.Tensor] | Exception:
    try:
        work.wait()
    except Exception as error:  # noqa: BLE001  (the future's, whatever it is)
        except_hook.remember(error)
        return error.with_traceback(None)
    return work.outputs
