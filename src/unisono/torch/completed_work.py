"""Works that were complete when they were made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch

from unisono._native import MOST_ENDED_RECEIVES
from unisono.torch_internals.c10d import Work


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

    Before the caller asks, a send of the same memory is refused: see csrc/p2p/receive_buffers.hpp. So that
    memory is kept: no other tensor may get its address. One Work serves all such receives of a group.

    Args:
        see: tells the engine that the caller has asked.
    Attributes:
        keep: keeps the tensor of one more receive.
    """

    def __init__(self, see: Callable[[], object]) -> None:
        super().__init__()
        self._see_received = see
        tensors: deque[torch.Tensor] = deque(maxlen=MOST_ENDED_RECEIVES)
        self.keep, self._release = tensors.append, tensors.clear

    def _see(self) -> None:
        self._release()  # first: what another thread receives meanwhile is kept
        self._see_received()

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
