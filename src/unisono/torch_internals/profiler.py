"""PyTorch's profiler, as its own backends use it from C++, and who else watches a thread's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.autograd import profiler

from .probe import PrivateName, optional

NAMES = {
    "on": PrivateName(
        "torch.autograd.profiler:_is_profiler_enabled",
        purpose="tell whether a profiler is recording",
        without="profiles have no events of Unisono",
    ),
    "begin": PrivateName(
        "torch._C._autograd:_record_function_with_args_enter",
        purpose="begin an event that another thread ends",
        without="profiles have no events of Unisono",
    ),
    "end": PrivateName(
        "torch:ops.profiler._call_end_callbacks_on_jit_fut",
        purpose="end an event when a future completes",
        without="profiles have no events of Unisono",
    ),
}

MODES = PrivateName(
    "torch._C:_len_torch_dispatch_stack",
    purpose="tell whether a TorchDispatchMode watches the operators of this thread",
    without="CommDebugMode sees no collective; a FlopCounterMode around up.Pipe counts nothing",
)

TRACING = PrivateName(
    "torch._C:_is_tracing",
    purpose="tell whether torch.jit.trace records the operators of this thread",
    without="it records a program without its collectives, and says nothing",
)

_BEGIN = optional(NAMES["begin"])
_END = optional(NAMES["end"])
_MODES: Any = optional(MODES) or int
_TRACING: Any = optional(TRACING) or bool
_HAS_ALL = _BEGIN is not None and _END is not None and optional(NAMES["on"]) is not None


def is_on() -> bool:
    """Say whether a profiler is recording."""
    return _HAS_ALL and profiler._is_profiler_enabled


def is_watched() -> bool:
    """Say whether a profiler, a TorchDispatchMode or torch.jit.trace watches this thread's operators."""
    return bool(_MODES() or (_HAS_ALL and profiler._is_profiler_enabled) or _TRACING())


def begin(name: str, inputs: Sequence[Any]) -> Any:
    """Begin an event with the shapes of `inputs`; return its record."""
    return _BEGIN(name, *inputs)


def end(record: Any, when: Any) -> Any:
    """End an event when the future `when` completes; return a future of it."""
    return _END(record, when)
