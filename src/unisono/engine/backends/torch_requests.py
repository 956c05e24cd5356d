"""Operations under way in process groups of PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import Tensor

from unisono.engine.backends.driver import LibraryRequest

__all__ = ["GlooMessageRequest", "GlooRequest", "GlooWaitRequest", "TorchMessageRequest", "TorchRequest"]

SLICE_S = 0.1
SLICE = timedelta(seconds=SLICE_S)


class TorchRequest(LibraryRequest):
    """Work of PyTorch."""

    def __init__(self, work: Any, keep: Any, finish: Callable[[], None] | None = None) -> None:
        self._work, self._keep, self._finish = work, keep, finish

    def done(self) -> bool:
        """See `LibraryRequest.done`."""
        return bool(self._work.is_completed())

    def block(self) -> None:
        """See `LibraryRequest.block`."""
        self._work.wait()

    def finish(self) -> None:
        """See `LibraryRequest.finish`."""
        finish, self._finish, self._keep = self._finish, None, None
        if finish is not None:
            finish()


class GlooRequest(TorchRequest):
    """A collective of Gloo. Its `wait` does not hear Ctrl-C, so it is called again and again."""

    def block(self) -> None:
        """See `LibraryRequest.block`."""
        while not self._work.is_completed():
            with suppress(RuntimeError):  # the slice is over, and nothing else has happened; or it has failed
                self._work.wait(SLICE)
        self._work.wait()  # the cause of its failure


class TorchMessageRequest(TorchRequest):
    """A send or a receive."""

    def __init__(self, work: Any, x: Tensor, src: int, tag: int) -> None:
        super().__init__(work, x)
        self.source, self.tag, self.nbytes = src, tag, x.numel()

    def finish(self) -> None:
        """See `LibraryRequest.finish`."""
        super().finish()
        if self.source < 0:
            self.source = int(self._work._source_rank())


class GlooWaitRequest(TorchRequest):
    """Work of Gloo. Only `wait` shows its end, and only once. So a thread waits if `done` is called."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._unclaimed, self._over = threading.Lock(), threading.Event()
        self._failure: Exception | None = None

    def done(self) -> bool:
        """See `LibraryRequest.done`."""
        if self._unclaimed.acquire(blocking=False):
            threading.Thread(target=self._end, name="unisono gloo", daemon=True).start()
        return self._over.is_set() and self._ended()

    def block(self) -> None:
        """See `LibraryRequest.block`."""
        if self._unclaimed.acquire(blocking=False):
            self._end()
        self._over.wait()
        self._ended()

    def _end(self) -> None:
        try:
            self._work.wait()
        except (RuntimeError, ValueError) as failure:
            self._failure = failure
        finally:
            self._over.set()

    def _ended(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return True


class GlooMessageRequest(GlooWaitRequest, TorchMessageRequest):
    """A message of Gloo."""
