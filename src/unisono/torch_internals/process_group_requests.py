"""What a program asked for when PyTorch makes a process group: backends and device.

PyTorch makes one backend for each device type and does not tell it of the others. A stand-in for NCCL that is
a whole process group must know them: in a group "cpu:gloo,cuda:nccl" it takes tensors of both devices.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from typing import Any, NamedTuple

import torch.distributed.distributed_c10d as c10d

from .probe import PrivateName, find, optional

MAKING = PrivateName(
    "torch.distributed.distributed_c10d:_new_process_group_helper",
    purpose="see which backends a group on virtual GPUs has, and its device_id; make the group of a dry run",
    without="a group of several backends, cpu:gloo,cuda:nccl, takes the tensors of one device only; "
    "up.plan cannot run",
)
REGISTERED = PrivateName(
    "torch.distributed.distributed_c10d:Backend._ensure_backend_registered",
    purpose="register NCCL's backends before their flight recorder is set; PyTorch does it at first use",
    without="backends are registered at once, as before 2.14",
    since="2.14",
)


class ProcessGroupRequest(NamedTuple):
    """The group that is being made: its backend, such as "cpu:gloo,cuda:nccl", and device_id, if any."""

    backend: str
    device_id: Any

    def devices(self) -> dict[str, str]:
        """Return the backend of each device type."""
        return dict(c10d.BackendConfig(self.backend).get_device_backend_map())


_CURRENT: contextvars.ContextVar[ProcessGroupRequest | None] = contextvars.ContextVar("request", default=None)


def ensure_registered(backend: str) -> None:
    """Register a backend of PyTorch if it has one of that name."""
    register = find(REGISTERED)
    if register is not None:
        register(backend)


def note_requests() -> None:
    """From now on `current_request` knows the group that is being made. May be called again."""
    made = optional(MAKING)
    if made is None or hasattr(made, "__wrapped__"):
        return
    signature = inspect.signature(made)

    @functools.wraps(made)
    def noted(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        token = _CURRENT.set(ProcessGroupRequest(str(given.get("backend", "")), given.get("device_id")))
        try:
            return made(*args, **kwargs)
        finally:
            _CURRENT.reset(token)

    module: Any = c10d
    module._new_process_group_helper = noted


def current_request() -> ProcessGroupRequest | None:
    """Return what the program asked for; None: this thread makes no group."""
    return _CURRENT.get()
