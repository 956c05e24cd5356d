"""What an asynchronous collective returns to PyTorch: `UnisonoWork`, and its future.

`wait()` waits on the engine's own Work, in the calling thread, with the GIL released. A future is made
only when PyTorch asks for one (DDP does): `WorkFutures` completes it from a Python thread of the group, which
waits in the engine and takes the GIL only to set a result. The engine's progress thread never does.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from unisono._native import stop_threads_at_the_end
from unisono.errors import UnisonoError
from unisono.torch_internals import autograd
from unisono.torch_internals.c10d import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

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


class Futures(Protocol):
    """What makes the futures of a group's works: `WorkFutures`."""

    def of(self, work: UnisonoWork) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of `work`."""


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
        futures: Futures,
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
