"""The base classes of `torch.cuda`'s Stream, Event and CUDAGraph, which PyTorch's CUDA build has in C++.

Work runs synchronously, in the order of the calls, which is a valid order on a GPU, too. So a stream is
always idle, a recorded event is complete, and waiting takes no time.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from torch import _C

if TYPE_CHECKING:
    from .native import VirtualGpuLibrary

CUDA = 1  # the number of PyTorch's device type
HIGH = 32  # streams above it have high priority: see csrc/virtual/device.cpp

_POOLS = itertools.count(1)

# mypy must pass with and without PyTorch installed.
# mypy: disallow-subclassing-any=False, warn-unused-ignores=False


def capturing() -> bool:
    """Whether this process captures a graph."""
    graphs = sys.modules.get(f"{__package__}.graphs")
    return graphs is not None and graphs.capturing()


def new_pool() -> tuple[int, int]:
    """Return a name for a pool of memory, from which graphs take nothing here."""
    return (0, next(_POOLS))


def _stream_class(library: VirtualGpuLibrary) -> type:
    class _CudaStreamBase(_C.Stream):  # type: ignore[misc]
        def __new__(cls, priority: int = 0, stream_ptr: int = 0, **place: int) -> Any:
            if stream_ptr:
                raise RuntimeError("a virtual GPU has no streams of other libraries (ExternalStream)")
            if any(place.values()):
                return super().__new__(cls, **{**place, "device_type": CUDA})
            device = _C._cuda_getDevice()  # type: ignore[attr-defined]
            return super().__new__(cls, device=f"cuda:{device}", priority=priority)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        @property
        def cuda_stream(self) -> int:
            handle: int = library.stream_handle(self.device_index, self.stream_id)
            return handle

        @property
        def priority(self) -> int:
            return -1 if self.stream_id > HIGH else 0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -3

    return _CudaStreamBase


class _CudaEventBase(_C.Event):  # type: ignore[misc]
    _timed: bool
    _at: float | None

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **unused: bool
    ) -> Any:
        if interprocess:
            raise RuntimeError("a virtual GPU has no events between processes (interprocess=True)")
        made: Any = super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)
        made._timed, made._at = enable_timing, None
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self._at = time.perf_counter()

    def elapsed_time(self, end: Any) -> float:
        if not (self._timed and end._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1e3 * float(end._at - self._at)

    @property
    def cuda_event(self) -> int:
        event: int = self.event_id
        return event


class _CudaGraphBase:
    _recorded: Any
    _generators: list[Any]
    _pool: tuple[int, int]
    _has_graph_exec = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made: Any = super().__new__(cls)
        made._recorded, made._generators, made._pool = None, [], new_pool()
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        from .graphs import RecordedGraph  # it needs all of PyTorch

        if self._recorded is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph: reset() it, or make another."
            )
        self._pool = self._pool if pool is None else tuple(pool)
        recorded = RecordedGraph(self._generators)
        recorded.begin()
        self._recorded = recorded

    def capture_end(self) -> None:
        self.capture_end_pre()
        self.capture_end_post()

    def capture_end_pre(self) -> None:
        self._recorded.end()

    def capture_end_post(self) -> None:
        if not self._recorded.steps:
            warnings.warn("The CUDA Graph is empty: nothing ran on a GPU while it was captured", stacklevel=3)

    def instantiate(self) -> None:
        pass

    def replay(self) -> None:
        if self._recorded is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._recorded.replay()

    def reset(self) -> None:
        self._recorded = None

    def pool(self) -> tuple[int, int]:
        return self._pool

    def register_generator_state(self, generator: Any) -> None:
        self._generators.append(generator)
