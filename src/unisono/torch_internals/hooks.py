"""PyTorch's hooks around collectives, since 2.14: how they attach, and which backends record themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .probe import PrivateName, find

__all__ = [
    "FLIGHT_RECORDER",
    "HOOKS",
    "NAN_CHECK",
    "SELF_RECORDING",
    "attach_flight_recorder",
    "before_attaching",
    "have_hooks",
    "records_itself",
]

C = "torch._C._distributed_c10d:"

HOOKS = PrivateName(
    C + "ProcessGroup.register_pre_hook",
    purpose="pass collectives through PyTorch's dispatcher once a hook is registered",
    without="process groups have no pre- and post-hooks",
    since="2.14",
)
NAN_CHECK = PrivateName(
    C + "NanCheckHook",
    purpose="notice that TORCH_DIST_NAN_CHECK=1 has attached its hook",
    without="TORCH_DIST_NAN_CHECK=1 checks nothing in groups of Unisono",
    since="2.14",
)
FLIGHT_RECORDER = PrivateName(
    C + "FlightRecorderHook",
    purpose="record the collectives where TORCH_FR_BUFFER_SIZE asks for it",
    without="PyTorch's flight recorder has no entries of Unisono",
    since="2.14",
)
SELF_RECORDING = PrivateName(
    "torch.distributed.distributed_c10d:_FR_SELF_RECORDING_BACKENDS",
    purpose="keep PyTorch from attaching its flight recorder to every group, which costs microseconds a call",
    without="calls pass PyTorch's dispatcher, and take some microseconds more",
    since="2.15",
)


def have_hooks() -> bool:
    """Whether process groups of this PyTorch have pre- and post-hooks."""
    return find(HOOKS) is not None


def before_attaching(notice: Callable[[Any], None]) -> None:
    """Call `notice(group)` before the NaN check or the flight recorder attaches its hook to a group.

    They attach in C++, where the group does not see it. May be called again: the last `notice` counts.
    """
    for kind in filter(None, map(find, (NAN_CHECK, FLIGHT_RECORDER))):
        original = getattr(kind.attach, "__wrapped__", kind.attach)
        kind.attach = staticmethod(_noticed(original, notice))


def _noticed(attach: Callable[..., Any], notice: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(attach)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        notice(group)
        return attach(group, *args, **kwargs)

    return call


def records_itself(backend: str) -> None:
    """Tell PyTorch that groups of this backend attach their flight recorder themselves."""
    found = find(SELF_RECORDING)
    if found is not None:
        found.add(backend)


def attach_flight_recorder(group: Any, ranks: list[int]) -> Any:
    """Record the group's collectives from now on, as long as the returned object lives; None: no recorder.

    ranks: the world's rank of each rank of the group.
    """
    kind = find(FLIGHT_RECORDER)
    if kind is None:
        return None
    return kind.attach(group, ranks) if "global_ranks" in (kind.attach.__doc__ or "") else kind.attach(group)
