"""The classes of PyTorch's process groups in C++. A process group of ours is made of them."""

from __future__ import annotations

import contextlib
import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .probe import PrivateName, find, need, optional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import (
        AllgatherOptions,
        AllreduceCoalescedOptions,
        AllreduceOptions,
        AllToAllOptions,
        Backend,
        BarrierOptions,
        BroadcastOptions,
        ErrorType,
        GatherOptions,
        PrefixStore,
        ProcessGroup,
        ReduceOp,
        ReduceOptions,
        ReduceScatterOptions,
        ScatterOptions,
        Store,
        Work,
    )

__all__ = [
    "NAMES",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Backend",
    "BarrierOptions",
    "BroadcastOptions",
    "ErrorType",
    "GatherOptions",
    "PrefixStore",
    "ProcessGroup",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "Store",
    "Work",
    "all_to_all_by_operator",
    "for_device",
    "forget_failed_world",
    "nccl",
    "renew_world",
    "set_backend",
    "timeout_of",
    "world",
]

LOW = "torch._C._distributed_c10d:"
NONE_AT_ALL = "unisono.torch cannot be imported"

NAMES = {
    name: PrivateName(LOW + name, purpose=purpose, without=NONE_AT_ALL)
    for name, purpose in {
        "ProcessGroup": "the base class of our process group",
        "Work": "the base class of what an asynchronous call returns",
        "Backend": "the base class of what PyTorch's dispatcher calls, where a group has hooks",
        "Store": "the type of the store that PyTorch hands to a backend",
        "PrefixStore": "keep the keys of one group apart from another's",
        "ErrorType": "what `get_error` returns",
        "ReduceOp": "the operation of a reduction, as the dispatcher passes it",
        **dict.fromkeys(
            (
                "AllToAllOptions",
                "AllgatherOptions",
                "AllreduceCoalescedOptions",
                "AllreduceOptions",
                "BarrierOptions",
                "BroadcastOptions",
                "GatherOptions",
                "ReduceOptions",
                "ReduceScatterOptions",
                "ScatterOptions",
            ),
            "what a collective is called with",
        ),
    }.items()
}

NAMES["set backend"] = PrivateName(
    LOW + "ProcessGroup._set_default_backend",
    purpose="let PyTorch's dispatcher call a backend (CUDA tensors by NCCL, hooks)",
    without="CUDA tensors, and hooks of process groups, raise",
)
NAMES["register"] = PrivateName(
    LOW + "ProcessGroup._register_backend",
    purpose="say for which device PyTorch's dispatcher calls a backend",
    without="CUDA tensors, and hooks of process groups, raise",
)
NAMES["of device"] = PrivateName(
    LOW + "ProcessGroup._get_backend",
    purpose="find our backend in a group of several, to make a group of its ranks",
    without="groups made from groups of several backends raise",
)
NAMES["all to all"] = PrivateName(
    "torch:ops.c10d.alltoall_base_",
    purpose="pass an all_to_all_single through PyTorch's dispatcher while a mode or a profiler watches it",
    without="such a call raises",
)
NAMES["nccl"] = PrivateName(
    LOW + "ProcessGroupNCCL",
    purpose="pass CUDA tensors on to NCCL",
    without="CUDA tensors raise, as with a build of PyTorch without CUDA",
    build="NCCL",
)
NAMES["number"] = PrivateName(
    LOW + "Backend._set_sequence_number_for_group",
    purpose="count the collectives that are passed on to NCCL",
    without="PyTorch's debugging of collectives does not count them",
)
NAMES["default group"] = PrivateName(
    "torch.distributed.distributed_c10d:_get_default_group",
    purpose="find the world",
    without="up.parallelize, and the benchmark of PyTorch's interface, cannot run",
)
NAMES["state"] = PrivateName(
    "torch.distributed.distributed_c10d:_world",
    purpose="let new_group use the ranks and the store of a world that was reconfigured, and a rank try "
    "init_process_group again",
    without="new_group fails after the world was reconfigured; a rank that tries again alone waits",
)
NAMES["coalescing"] = PrivateName(
    "torch.distributed.distributed_c10d:_coalescing_manager",
    purpose="forget what its block has collected, when the block raises",
    without="after such an error a group keeps the tensors of all later asynchronous calls",
)
NAMES["default store"] = PrivateName(
    "torch.distributed.distributed_c10d:_get_default_store",
    purpose="tell other ranks that a training step failed here",
    without="up.parallelize cannot run",
)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in __all__ and name in NAMES:
            return need(NAMES[name])
        raise AttributeError(name)


def nccl() -> Any:
    """Return the class of NCCL's process groups; None: this build of PyTorch has none."""
    return find(NAMES["nccl"])


def set_backend(group: Any, kind: Any, backend: Any, devices: list[Any]) -> None:
    """Make `backend` the one that the dispatcher calls, for tensors on `devices`."""
    need(NAMES["set backend"])
    need(NAMES["register"])
    for device in devices:
        group._register_backend(device, kind, backend)
    group._set_default_backend(kind)


def all_to_all_by_operator(
    group: Any,
    output: Any,
    given: Any,
    output_sizes: Any,
    input_sizes: Any,
    asynchronous: bool,
    timeout: timedelta,
) -> Any:
    """Call PyTorch's operator for the method `all_to_all_single`."""
    operator = need(NAMES["all to all"])
    milliseconds = timeout // timedelta(milliseconds=1)
    work = operator(
        output, given, group.boxed(), list(output_sizes), list(input_sizes), asynchronous, milliseconds
    )
    return need(NAMES["Work"]).unbox(work)


def for_device(group: Any, device: str) -> Any:
    """Return the backend of `group` for tensors on a device, such as "cpu"."""
    need(NAMES["of device"])
    return group._get_backend(torch.device(device))


def timeout_of(group: Any) -> Any:
    """Return the timeout of a group's calls, a timedelta; None: its backends have none, or several."""
    need(NAMES["of device"])
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    found = {getattr(each, "_timeout", None) for each in options}
    return found.pop() if len(found) == 1 else None


def count_collectives(backend: Any) -> None:
    """Begin to count the collectives of a backend in C++."""
    if find(NAMES["number"]) is not None:
        backend._set_sequence_number_for_group()


def world() -> tuple[Any, Any]:
    """Return the group of all ranks, and the store through which it was made."""
    return need(NAMES["default group"])(), need(NAMES["default store"])()


def renew_world(group: Any, store: Any, agree: Callable[[int], int]) -> None:
    """Tell PyTorch that its default group has other ranks and another store; another group: do nothing.

    Args:
        agree: returns the largest of the numbers that the ranks give. PyTorch counts groups to name the next
            one, and processes that met later have counted fewer.
    """
    everybody: Any = torch.distributed.GroupMember.WORLD
    if everybody is not group:
        return
    state = optional(NAMES["state"])
    if state is not None:
        state.pg_map[group] = state.pg_map[group][0], store
        state.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
        state.group_count = agree(state.group_count)


def forget_failed_world() -> None:
    """Give the next default group the name it has on ranks where none failed.

    PyTorch counts groups to name them, and `destroy_process_group` begins anew; an `init_process_group` that
    raised leaves its count. That rank then waited for keys of another name than the others set.
    """
    state = find(NAMES["state"])
    if state is not None and not torch.distributed.is_initialized():
        state.group_count = 0


def forget_failed_coalescing(forget: Callable[[Any], None]) -> None:
    """Call `forget(group)` when a block of PyTorch's coalescing manager raises. May be called again.

    PyTorch itself keeps the block's list, and adds every later call to it in place of running it.
    """
    original = find(NAMES["coalescing"])
    if original is None or hasattr(original, "forgets"):
        return

    @contextlib.contextmanager
    @functools.wraps(original)
    def forgetting(group: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        group = group or need(NAMES["default group"])()
        lists = need(NAMES["state"]).pg_coalesce_state
        nested = group in lists
        try:
            with original(group, *args, **kwargs) as manager:
                yield manager
        except BaseException:
            if not nested:
                lists.pop(group, None)
                forget(group)
            raise

    forgetting.forgets = True  # type: ignore[attr-defined]
    high: Any = torch.distributed
    high.distributed_c10d._coalescing_manager = high._coalescing_manager = forgetting
