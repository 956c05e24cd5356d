"""PyTorch's engine of backward passes, and its futures in C++: what DDP does with a Work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import training
from .probe import PrivateName, find, need

if TYPE_CHECKING:
    from types import FrameType

PYTORCHS_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."

NAMES = {
    "run": PrivateName(
        "torch.autograd.graph:_engine_run_backward",
        purpose="tell that DDP's C++ asks for a future, in a backward pass",
        without="an error of a collective of DDP is a RuntimeError; DDP's built-in FP16_COMPRESS fails",
    ),
    "engine": PrivateName(
        "torch.autograd:Variable._execution_engine",
        purpose="raise the error of a collective of DDP at the end of the backward pass",
        without="an error of a collective of DDP is a RuntimeError",
    ),
    "fork": PrivateName(
        "torch._C:fork",
        purpose="make a future whose value is a list of tensors also in C++, as FP16_COMPRESS takes it",
        without="DDP's built-in FP16_COMPRESS fails",
    ),
    "set result": PrivateName(
        "torch._C:Future.set_result",
        purpose="complete a future without a Python frame, which would be in the text of its error",
        without="errors of futures have more lines",
    ),
    "next sequence": PrivateName(
        "torch._C:_autograd._get_sequence_nr",
        purpose="tell which module backward comes to where a step is predicted",
        without="up.StepPredictor and up.plan cannot run",
    ),
    "running": PrivateName(
        "torch._C:_current_autograd_node",
        purpose="tell which module backward comes to where a step is predicted",
        without="up.StepPredictor and up.plan cannot run",
    ),
}

_RUN: Any = getattr(find(NAMES["run"]), "__code__", None)
_ENGINE: Any = find(NAMES["engine"])
_SET_RESULT: Any = find(NAMES["set result"])


def from_backward(caller: FrameType | None) -> bool:
    """Whether C++ made the call, in a backward pass or without one. caller: the frame that calls a method."""
    return caller is None or caller.f_code is _RUN


def from_ddp(caller: FrameType | None) -> bool:
    """Whether DDP asks for a future in a backward pass: its C++, or one of PyTorch's communication hooks.

    False for a hook of the user: it may handle an error. False in a nested backward pass, as in
    checkpointing: the inner pass ends before DDP's.
    """
    while caller is not None and caller.f_globals.get("__name__", "").startswith(PYTORCHS_HOOKS):
        caller = caller.f_back
    if caller is None or caller.f_code is not _RUN:
        return False
    while (caller := caller.f_back) is not None:
        if caller.f_code is _RUN:
            return False
    return _ENGINE is not None


def after_backward(call: Callable[[], object]) -> None:
    """Call when the backward pass ends. Only inside of one."""
    _ENGINE.queue_callback(call)


def future_in_cpp(values: Callable[[], Any]) -> Any:
    """Return a completed future of `values()`, a list of tensors.

    In C++ the value of a future made in Python is a Python object. PyTorch takes the type from an existing
    value.
    """
    return need(NAMES["fork"])(values)


def next_sequence() -> int:
    """Return the number that the next function of autograd gets in this thread; -1: not known."""
    tells = find(NAMES["next sequence"])
    return -1 if tells is None else int(tells())


def in_backward() -> bool:
    """Return whether a function's backward runs in this thread; True, too, if nothing tells."""
    tells = find(NAMES["running"])
    return tells is None or tells() is not None


def running_sequence() -> int:
    """Return the number of the function whose backward runs; -1: none, or not known."""
    tells = find(NAMES["running"])
    function = None if tells is None else tells()
    return -1 if function is None else training.sequence_of(function)


def numbers_functions() -> bool:
    """Return whether `next_sequence` and `running_sequence` are known."""
    names = NAMES["next sequence"], NAMES["running"], training.NAMES["sequence"]
    return all(find(name) is not None for name in names)


def set_result(future: Any) -> None:
    """Complete a future with None."""
    (_SET_RESULT or type(future).set_result)(future, None)
