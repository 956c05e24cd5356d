"""Events for PyTorch's profiler: one per call, "unisono:all_reduce", with the shapes of the inputs.

An event lasts from the call to its completion, and ends in a thread of the group, as in PyTorch's own
backends: its profilers call such an event asynchronous. Nothing here runs unless a profiler is on.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unisono.torch_internals import profiler
from unisono.torch_internals.profiler import is_on, is_watched

from .work import TransferWork, UnisonoWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .futures import WorkFutures
    from .work import EngineWork

__all__ = ["ProfilerEvent", "is_on", "is_watched"]


class ProfilerEvent:
    """An event that has begun. It ends with a work, or when it is dropped because the call failed."""

    def __init__(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        self._record: Any = profiler.begin(name, inputs)

    def ends_with(
        self,
        native: EngineWork,
        futures: WorkFutures,
        after: Callable[[], None] | None = None,
        *,
        ordered: bool = True,
    ) -> Callable[[], None]:
        """End when `native` completes, with or without an error.

        Returns a function to call after the completion: it runs `after`, then waits for the end of the event.
        """
        work = (UnisonoWork if ordered else TransferWork)(native, [], futures)
        completed: torch.futures.Future[None] = torch.futures.Future()
        ended: Any = profiler.end(self._record, completed)
        futures.call_when_done(work, partial(completed.set_result, None))

        def finish() -> None:
            if after:
                after()
            ended.wait()

        return finish
