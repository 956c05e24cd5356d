"""The futures of works: which thread waits for a work, and completes its future."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from unisono._native import call_each, outcome
from unisono.engine.base.limits import replaced_threads
from unisono.engine.diagnosis import except_hook
from unisono.errors import message
from unisono.torch_internals import autograd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .work import UnisonoWork

PATIENCE_S = 5.0  # how long closing waits for the threads of futures


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
            RuntimeError: see `call_when_done`.
        """
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
