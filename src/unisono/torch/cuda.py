"""Passes calls with CUDA tensors to an NCCL process group, which is made on first use.

The first tensor of a call decides. If it is on a CUDA device, the call goes unchanged to the method of the
same name of a `torch.distributed.ProcessGroup` with PyTorch's own ProcessGroupNCCL. Unisono moves CPU memory.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from unisono.engine.backends.torch_store import part
from unisono.errors import message
from unisono.torch_internals import c10d
from unisono.torch_internals.version_names import method_of

from .arguments import PLAIN
from .nccl_substitute import current

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    Method = TypeVar("Method", bound=Callable[..., Any])

CUDA = torch.device("cuda")


def any_device(method: Method) -> Method:
    """Make a method of the process group forward calls with CUDA tensors. `direct`: the original method."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        first: Any = args[0] if args else None
        if type(first) is list and len(first) == 1:
            first = first[0]
        usual = type(first) in PLAIN and not first.is_cuda  # the usual case: no further check
        if not usual and is_cuda(args or tuple(kwargs.values())):
            return method_of(self._cuda.group, name)(*args, **kwargs)
        return method(self, *args, **kwargs)

    call.direct = method  # type: ignore[attr-defined]
    return cast("Method", call)


def is_cuda(given: Any) -> bool:
    """Whether the first tensor in the (nested) arguments is on a CUDA device. Example: ([], [[x]]) -> x's."""
    first = first_tensor(given)
    return first is not None and bool(first.is_cuda)


def first_tensor(given: Any) -> Any:
    """Return the first tensor in the (nested) arguments; None if there is none."""
    if isinstance(given, torch.Tensor):
        return given
    if isinstance(given, (list, tuple)):
        return next((found for found in map(first_tensor, given) if found is not None), None)
    return None


class CudaGroup:
    """The NCCL part of a group, made by the first access to `group`, which all ranks have to make."""

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self.timeout = timeout
        self._group: Any = None
        self._making = threading.RLock()  # two threads that each made a group would not match the other ranks

    @property
    def made(self) -> bool:
        """Whether the group was made."""
        return self._group is not None

    @property
    def group(self) -> Any:
        """A process group for CUDA tensors.

        Raises:
            RuntimeError: CUDA or NCCL is not available; the text says which.
        """
        if self._group is None:
            with self._making:
                if self._group is None:
                    store = part(self._store, "cuda/")
                    self._group = open_nccl(store, self._rank, self._size, self.timeout)
        return self._group

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout, now or for later."""
        self.timeout = timeout
        if self.made:
            self._group.set_timeout(timeout)

    def shutdown(self) -> None:
        """Close the group, if it was made."""
        if self.made:
            self._group.shutdown()

    def abort(self) -> None:
        """Abort the group, if it was made."""
        if self.made:
            self._group.abort()


def why_not() -> str:
    """What is missing for CUDA tensors; empty if nothing is."""
    if current():
        return ""
    if c10d.nccl() is None:
        return "this PyTorch was built without NCCL; install one that was built for CUDA"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False: no device, or no driver for it"
    return ""


def open_nccl(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A ProcessGroup whose CUDA backend is ProcessGroupNCCL.

    Raises:
        RuntimeError: see `why_not`.
    """
    if stand_in := current():
        return stand_in.group(store, rank, size, timeout, "cuda")
    missing = why_not()
    if missing:
        text = message("CUDA tensors are passed on to NCCL, which cannot be had", observed=missing)
        raise RuntimeError(text)
    kind = c10d.nccl()
    options = kind.Options()
    options._timeout = timeout
    backend = kind(store, rank, size, options)
    c10d.count_collectives(backend)
    group: Any = c10d.ProcessGroup(store, rank, size)
    c10d.set_backend(group, c10d.ProcessGroup.BackendType.NCCL, backend, [CUDA])
    return group
