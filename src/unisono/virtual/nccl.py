"""The backend "nccl" on virtual GPUs: a process group of Unisono that moves their memory.

The memory of a virtual GPU is host memory, so the engine uses it in place. A call that NCCL refuses raises
NCCL's error text; a call that would hang in NCCL is an error here. For real GPUs see torch/cuda.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
import zlib
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.autograd.graph import increment_version

from unisono.engine.environment import env
from unisono.engine.environment.event_log import LOG
from unisono.errors import Timeout, message
from unisono.torch import nccl_substitute, registration
from unisono.torch.arguments import TensorArguments, options, single
from unisono.torch.collectives import Collectives, flat
from unisono.torch.cuda import first_tensor, is_cuda
from unisono.torch.hooks import COLLECTIVES, OLD_NAMES
from unisono.torch.nccl_substitute import NcclSubstitute
from unisono.torch.process_group import ProcessGroupUnisono, world
from unisono.torch.reconfiguration import Unconnected
from unisono.torch.subgroups import NO_PARENT, ParentRanks
from unisono.torch.work import UnisonoWork
from unisono.torch_internals import hooks, nccl_slots
from unisono.torch_internals.c10d import AllgatherOptions, ReduceScatterOptions
from unisono.torch_internals.dynamo import skip
from unisono.torch_internals.process_group_requests import (
    ProcessGroupRequest,
    current_request,
    ensure_registered,
    note_requests,
)

from . import nccl_limits
from .device_owners import DeviceOwners
from .graphs import as_one_step
from .inductor import runs_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from unisono.engine.group.native import NativeGroup
    from unisono.torch.shrinking import Survivors

# mypy must pass with and without PyTorch installed.
# mypy: disallow-subclassing-any=False, warn-unused-ignores=False

NAMES = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")
"""The names of NCCL's backends in PyTorch; before 2.14 there is the first one only."""

MEANT = ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "NCCL_VERSION")
CHECKED = tuple(
    name
    for name, method in vars(Collectives).items()
    if callable(method) and not name.startswith("__") and name not in ("barrier", "monitored_barrier")
)
CUDA = torch.device("cuda")
WATCHDOG = "With NCCL: Watchdog caught collective operation timeout."


class VirtualNcclWork(UnisonoWork):
    """A Work whose timeout has NCCL's error text, too: programs search for it."""

    __slots__ = ()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until complete. Raises PeerLost, Timeout or Mismatch as the engine does."""
        with watchdog_words():
            return super().wait(timeout)


@contextlib.contextmanager
def watchdog_words() -> Iterator[None]:
    """Append NCCL's text to that of a timeout."""
    try:
        yield
    except Timeout as error:
        if WATCHDOG not in str(error):
            error.args = (f"{error}\n{WATCHDOG}", *error.args[1:])
        raise


class ProcessGroupVirtual(ProcessGroupUnisono):
    """`torch.distributed` over one `unisono.Group`, for tensors of virtual GPUs."""

    _moves_cuda = True
    _like_nccl = True
    _work: type[UnisonoWork] = VirtualNcclWork
    bound_device_id: Any = None

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        *,
        devices: tuple[str, ...] = ("cuda",),
        options: Any = None,
        backend: str = "nccl",
        parent_ranks: ParentRanks = NO_PARENT,
        connects: bool = True,
    ) -> None:
        self._takes = frozenset(devices)
        self._options = options
        super().__init__(
            store, rank, size, timeout, name, backend=backend, parent_ranks=parent_ranks, connects=connects
        )

    def _take(self, group: NativeGroup, keys: Any) -> None:
        """Become the process group of an engine's group."""
        super()._take(group, keys)
        self._owners = DeviceOwners(c10d.PrefixStore("devices/", keys), self._rank, self._size)
        self._log("Init COMPLETE")

    def _close(self) -> None:
        """See `ProcessGroupUnisono`."""
        self._log("Destroy COMPLETE")
        super()._close()

    def _log(self, event: str) -> None:
        """Write the line that NCCL writes at this event: scripts look for it."""
        if LOG.level and not isinstance(self._group, Unconnected) and not self._group.closed:
            device, number = torch.cuda.current_device(), zlib.crc32(self._group.name.encode())
            LOG.info(
                "init",
                f"{os.uname().nodename}:{os.getpid()}:{threading.get_native_id()} [{device}] NCCL INFO "
                f"comm {id(self):#x} rank {self._rank} nranks {self._size} cudaDev {device} nvmlDev {device} "
                f"busId {(device + 1) << 12:x} commId {number:#x} - {event}",
            )

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it takes."""
        return [torch.device(kind) for kind in sorted(self._takes)]

    def _get_backend(self, device: torch.device | str) -> Any:
        """Return itself.

        Raises:
            RuntimeError: it takes no tensors of that device.
        """
        self._check(torch.device(device).type)
        return self

    @property
    def options(self) -> Any:
        """The `ProcessGroupNCCL.Options` of the group."""
        return super().options if self._options is None else self._options

    @property
    def supports_splitting(self) -> bool:  # type: ignore[override]
        """For `split_group`; `new_group` would want a backend in C++ to split, so it makes a group anew."""
        return current_request() is None

    def _check(self, kind: str) -> None:
        if kind not in self._takes and not runs_compiled():
            raise RuntimeError(f"No backend type associated with device type {kind}")

    def _make(self, *place: Any, parent_ranks: ParentRanks = NO_PARENT, connects: bool = True) -> Any:
        """Make a group of this one's kind."""
        kind: Any = {"devices": tuple(self._takes), "options": self._options, "backend": self._backend}
        return _process_group(*place, parent_ranks=parent_ranks, connects=connects, **kind)

    def _successor(self, survivors: Survivors, timeout: timedelta, opts: Any) -> Any:
        """A process group for the survivors of `shrink`, with the options that it was given."""
        made = super()._successor(survivors, timeout, opts)
        if opts is not None:
            made._options = opts
        return made


class ProcessGroupVirtualGloo(ProcessGroupVirtual):
    """A group named "gloo", for tensors of the CPU and of virtual GPUs: without NCCL's limits and texts."""

    _like_nccl = False
    _work = UnisonoWork


def _process_group(*place: Any, backend: str = "nccl", **kind: Any) -> ProcessGroupVirtual:
    made = ProcessGroupVirtualGloo if backend == "gloo" else ProcessGroupVirtual
    return made(*place, backend=backend, **kind)


class _UnevenCollectives:
    """Calls with lists that only NCCL accepts: other sizes on each rank, or another length than one per rank.

    NCCL takes a list of equal tensors as one tensor. Source: PyTorch's ProcessGroupNCCL::allgather.
    """

    def allgather(self: Any, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Collect the tensors of all ranks; their sizes may differ, as in NCCL.

        Example (p=4): each rank's [2] -> a list of one [8], or of two [4].
        """
        lists, x = flat(outputs), single("all_gather", inputs)
        if _as_one(lists, x, self._size):
            opts = options(AllgatherOptions, opts, timeout=timeout)
            call = TensorArguments("all_gather")
            return self._run(
                self._group.all_gather, opts, lists, call, call.write_as_one(lists), call.read(x)
            )
        if all(out.numel() == x.numel() for out in lists) or any(out.dim() == 0 for out in lists):
            return PLAIN_METHODS["allgather"](self, outputs, inputs, opts, timeout)
        opts = options(AllgatherOptions, opts, timeout=timeout)
        call = TensorArguments("all_gather")
        written = call.write_each(lists)
        return self._run(self._group.all_gather_v, opts, lists, call, written, call.read(x))

    def reduce_scatter(
        self: Any, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Any:
        """Reduce a list of tensors, which may be another number than one per rank, as in NCCL.

        Example (p=4): a list of one [8], or of two [4] -> [2] on each rank.
        """
        out, given = single("reduce_scatter", outputs), flat(inputs)
        opts = options(ReduceScatterOptions, opts, reduceOp=opts if op is None else op, timeout=timeout)
        if _as_one(given, out, self._size):
            together = torch.cat([x.reshape(-1) for x in given])
            return PLAIN_METHODS["reduce_scatter_single"](self, out, together, opts)
        return PLAIN_METHODS["reduce_scatter"](self, outputs, inputs, opts)


def _as_one(tensors: list[torch.Tensor], part: torch.Tensor, size: int) -> bool:
    """Whether the tensors are not one per rank, but together are as large as `part` from every rank."""
    if not tensors or len(tensors) == size or any(x.shape != tensors[0].shape for x in tensors):
        return False
    return len(tensors) * tensors[0].numel() == size * part.numel()


INSTEAD = {name: method for name, method in vars(_UnevenCollectives).items() if callable(method)}
PLAIN_METHODS: dict[str, Any] = {}


def _with_device_check(name: str) -> Callable[..., Any]:
    """Make a method that checks its first tensor, and then calls that of Collectives."""
    method = getattr(Collectives, name)
    plain = PLAIN_METHODS[name] = getattr(method, "direct", method)
    made = INSTEAD.get(name, plain)
    in_place = name in ("allreduce", "broadcast", "reduce")

    def call(self: ProcessGroupVirtual, *args: Any, **kwargs: Any) -> Any:
        tensor = first_tensor(args or tuple(kwargs.values()))
        if tensor is None:
            return made(self, *args, **kwargs)
        self._check(tensor.device.type)
        if not self._like_nccl:
            return made(self, *args, **kwargs)
        if tensor.is_cuda:
            nccl_limits.check(name, args, kwargs)
        if in_place and not tensor.is_inference():
            increment_version(tensor)  # NCCL omits this, and gradients that need the old values are wrong
        if tensor.is_cuda and not self._owners.agreed:
            self._owners.agree(tensor.device)
        with watchdog_words():
            return as_one_step(made, (self, *args), kwargs)

    call.__name__, call.__doc__ = name, plain.__doc__
    return call


for _name in CHECKED:
    setattr(ProcessGroupVirtual, _name, _with_device_check(_name))
skip(ProcessGroupVirtual, ProcessGroupVirtualGloo, _UnevenCollectives)


class Options:
    """`ProcessGroupNCCL.Options`: accepted; only the timeout has an effect."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.backend = "nccl"
        self.config = NCCLConfig()
        self.split_from: Any = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class NCCLConfig(SimpleNamespace):
    """`ProcessGroupNCCL.NCCLConfig`: accepted, without effect."""

    def __init__(self) -> None:
        super().__init__(blocking=1, cga_cluster_size=4, min_ctas=1, max_ctas=32, net_name="", split_share=0)


class NcclReplacement(type):
    """The metaclass of the class that replaces PyTorch's ProcessGroupNCCL."""

    def __call__(cls, store: Any, rank: int, size: int, options: Any = None, device: Any = None) -> Any:
        """Make a group with the backend name "nccl". device: the GPU to which 2.15 binds it."""
        given = options if isinstance(options, (Options, timedelta)) else Options()
        timeout = given if isinstance(given, timedelta) else given._timeout
        everybody = c10d.GroupMember.WORLD
        name = "world" if everybody is None else "group"
        ranks = given.global_ranks_in_group if isinstance(given, Options) else []
        parent_ranks = ParentRanks(world(), ranks) if everybody is not None and ranks else NO_PARENT
        request = current_request()
        group = ProcessGroupVirtual(
            store,
            rank,
            size,
            timeout,
            name,
            devices=_devices(request),
            options=given,
            parent_ranks=parent_ranks,
        )
        group.bound_device_id = device or (request and request.device_id)
        return group

    def __instancecheck__(cls, instance: Any) -> bool:
        """True for the groups made here."""
        return isinstance(instance, ProcessGroupVirtual) and instance._like_nccl


def _devices(request: ProcessGroupRequest | None) -> tuple[str, ...]:
    """Return the device types of a group that stands for all its backends, if there are others."""
    backends = {} if request is None else request.devices()
    return ("cuda",) if set(backends.values()) <= set(NAMES) else tuple(backends)


def _refuse_in_gloo(kind: Any) -> None:
    """Let PyTorch's own class of Gloo, of which programs make groups themselves, refuse these tensors."""
    for name in (*COLLECTIVES, *OLD_NAMES):
        method = getattr(kind, name, None)
        if method is not None:
            setattr(kind, name, _for_host_only(name, method))


def _for_host_only(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_cuda(args or tuple(kwargs.values())):
            raise RuntimeError(
                message(
                    f"{name} of PyTorch's ProcessGroupGloo got a tensor of a virtual GPU",
                    expected="a CPU tensor",
                    remedy="Groups of init_process_group and new_group take both; so does --replace gloo.",
                )
            )
        return method(self, *args, **kwargs)

    return call


def _hash_tensors(tensors: list[torch.Tensor], mode: int = 0) -> int:  # noqa: ARG001
    """Return a number that differs where the contents do; PyTorch logs it."""
    return sum(zlib.crc32(x.cpu().numpy().tobytes()) for x in tensors)


def install(module: ModuleType) -> None:  # noqa: ARG001
    """Install the replacement of ProcessGroupNCCL, after the import of `unisono.torch`."""
    nccl_substitute.install(NcclSubstitute(_process_group, torch.ops.unisono_virtual.host))
    namespace = {"Options": Options, "NCCLConfig": NCCLConfig, "__module__": c10d.__name__}
    replacement: Any = NcclReplacement("ProcessGroupNCCL", (), namespace)
    nccl_slots.replace_nccl(replacement, timeout=timedelta(minutes=10), hash_tensors=_hash_tensors)
    for name in NAMES:
        ensure_registered(name)
        hooks.records_itself(name)
    note_requests()
    if torch.version.cuda is None:  # a CUDA build's Gloo copies their memory, this one's ends by SIGSEGV
        registration.replace_gloo()
        replaced: Any = c10d.ProcessGroupGloo
        _refuse_in_gloo(replaced.original)
    without = sorted(name for name in env.copy() if name.startswith("NCCL_") and name not in MEANT)
    if without:
        text = f"Unisono: {', '.join(without)} change nothing on virtual GPUs"
        warnings.warn(text, UserWarning, stacklevel=2)
