"""The process group of backend "unisono" in PyTorch: its identity, beginning and end.

A Python subclass of `torch.distributed.ProcessGroup` returned by a backend's creator becomes the group
itself. PyTorch asks for one property under several names (`group_name`, `getGroupName`): from Python, from
C++ through virtual methods, and through properties of its backends.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import unisono.engine.group
from unisono.engine.backends.torch_store import TorchStore
from unisono.engine.environment import env
from unisono.engine.group.notices import announce
from unisono.engine.operations.reduction import ReduceOp
from unisono.errors import UnisonoError, message
from unisono.torch_internals import c10d
from unisono.torch_internals import hooks as internals
from unisono.torch_internals.dynamo import skip

from .collectives import Collectives
from .completed_work import CompletedReceive
from .cuda import CUDA, CudaGroup, why_not
from .futures import WorkFutures
from .group_calls import GroupCalls
from .hooks import AbortHooks, HookMethods
from .monitored_barrier import MonitoredBarrier
from .nccl_substitute import current
from .openmp import warn_if_crowded
from .reconfiguration import Reconfigurable, Unconnected
from .shrinking import Shrinkable
from .subgroups import NO_PARENT, GroupCounter, ParentRanks
from .unsupported import UnsupportedMethods
from .work import TransferWork, UnisonoWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from unisono.engine.costs.tuner import AlgorithmChoice
    from unisono.engine.group.native import NativeGroup

# mypy must pass with and without PyTorch installed.
# mypy: disallow-subclassing-any=False, warn-unused-ignores=False


def create(given: Any, backend_options: Any) -> ProcessGroupUnisono:  # noqa: ARG001
    """Make the process group; PyTorch calls this in `init_process_group` and `new_group`.

    Args:
        given: PyTorch's DistributedBackendOptions: store, group_rank, group_size, timeout, group_id.
        backend_options: what the user gave as `pg_options`; Unisono has none.
    """
    name = f"group {given.group_id}" if given.global_ranks_in_group else "world"
    place = (given.store, given.group_rank, given.group_size, given.timeout, name)
    ranks = given.global_ranks_in_group
    parent_ranks = ParentRanks(world(), ranks) if ranks else NO_PARENT
    connects = not getattr(given, "enable_reconfigure", False)
    if stand_in := current():
        group: ProcessGroupUnisono = stand_in.group(
            *place, devices=("cpu", "cuda"), backend="unisono", parent_ranks=parent_ranks, connects=connects
        )
        return group
    return ProcessGroupUnisono(*place, parent_ranks=parent_ranks, connects=connects)


class ProcessGroupUnisono(  # type: ignore[misc]
    UnsupportedMethods, HookMethods, Reconfigurable, Shrinkable, Collectives, c10d.ProcessGroup
):
    """`torch.distributed` over one `unisono.Group`."""

    own_name = "unisono"

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        *,
        backend: str = "unisono",
        parent_ranks: ParentRanks = NO_PARENT,
        connects: bool = True,
    ) -> None:
        """Make the group; with `connects=False` it has no ranks before `reconfigure`."""
        super().__init__(rank, size)  # type: ignore[call-arg]  # with a store: no virtual methods
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._backend = backend
        self._group_name = name
        self._group_desc = ""
        self._hooks = AbortHooks()
        self._batch = None
        self._recent = deque(maxlen=16)
        self._store = store
        self._global_ranks = [*parent_ranks.ranks] or list(range(size))
        self._unconnected()
        if connects:
            self._join(store, parent_ranks)

    def _unconnected(self) -> None:
        """Leave the group without ranks: every call raises."""
        nobody: Any = Unconnected()
        self._set_group(nobody)
        self._cuda = self._monitored = nobody
        self._finalizer: Callable[[], Any] = nobody.close

    def _join(
        self, store: c10d.Store, parent_ranks: ParentRanks = NO_PARENT, timeout: timedelta | None = None
    ) -> None:
        """Make the engine's group, of the ranks that meet in the store.

        Args:
            timeout: for the ranks to meet; None: the group's.
        """
        rank, size, name = self._rank, self._size, self._group_name
        timeout_s = (timeout or self._timeout).total_seconds()
        parent = parent_ranks.parent(f"making {name}", size)
        self._group_counter = GroupCounter(store, rank, parent_ranks.group)
        keys = self._group_counter.keys()
        with self._group_counter.attempt():
            group = unisono.engine.group.connect(
                TorchStore(keys, timeout_s=timeout_s),
                rank,
                size,
                name=name,
                timeout_s=timeout_s,
                members=tuple(self._global_ranks) if len(self._global_ranks) == size else None,
                parent=parent,
                engine_settings=parent_ranks.engine_settings,
            )
        if parent_ranks is NO_PARENT:
            warn_if_crowded(group._hosts, rank)
            if size > 1:  # a process alone may join others later
                announce(group)  # then a lost rank does not end an elastic job
        self._take(group, keys)

    def _take(self, group: NativeGroup, keys: c10d.Store) -> None:
        """Become the process group of an engine's group. keys: a part of the store for this group only."""
        rank, size = self._rank, self._size
        self._futures = WorkFutures(f"unisono futures {self._group_name}")
        # Also at exit: no thread may remain that completes a future.
        self._finalizer = weakref.finalize(self, _end, group, self._futures, os.getpid())
        self._set_group(group)
        self._limit(self._timeout)
        self._cuda = CudaGroup(keys, rank, size, self._timeout)
        self._monitored = MonitoredBarrier(keys, rank, size, group.last_seen)

    def _set_group(self, group: NativeGroup) -> None:
        self._group = group
        self._repeat, self._send_now, self._recv_now = group._repeat, group._send_now, group._recv_now
        self._received = CompletedReceive(group._see_received)

    # ---- identity ----

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    getRank, getSize = rank, size  # noqa: N815  # for C++: they change when the group is reconfigured

    def getBackendName(self) -> str:  # noqa: N802
        """Return `own_name`, or "mpi". For C++: it would cast a "gloo" to a C++ ProcessGroupGloo."""
        return "mpi" if self._backend == "mpi" else self.own_name

    def name(self) -> str:
        """Return "unisono", or "gloo" where the group replaces Gloo."""
        return self._backend

    _get_backend_name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name by which functional collectives find the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name, by PyTorch."""
        self._group_name = name

    group_name = property(getGroupName)
    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return PyTorch's description of the group, such as "default_pg"."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the description, by PyTorch."""
        self._group_desc = desc

    group_desc = property(getGroupDesc)

    def _set_group_desc(self, desc: str) -> None:
        """Set the description, by PyTorch: the last step in which it makes a group."""
        self.setGroupDesc(desc)
        if env.flight_recorder():
            self._flight_recorder = internals.attach_flight_recorder(self, self._global_ranks)

    def get_group_store(self) -> c10d.Store:
        """Return PyTorch's store of this group."""
        return self._store

    def __repr__(self) -> str:
        place = f"rank={self._rank}, size={self._size}"
        instead = "" if self._backend == self.own_name else f", in place of {self._backend}"
        return f"{type(self).__name__}({self._group_name!r}, {place}{instead})"

    # ---- as its own backend ----

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it takes."""
        return [torch.device("cpu")] if why_not() else [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device | str) -> Any:
        """Return the backend for `device`: itself for the CPU, PyTorch's ProcessGroupNCCL for CUDA.

        Raises:
            RuntimeError: there is none; the text says what is missing.
        """
        kind = torch.device(device).type
        if kind == "cuda":
            return self._cuda.group._get_backend(CUDA)
        if kind != "cpu":
            raise RuntimeError(f"unisono has no backend for device {device}: it takes CPU and CUDA tensors")
        return self

    get_backend = _get_backend

    def _backend_id(self, backend_type: Any) -> int:  # noqa: ARG002
        """Return a number that identifies the group."""
        return id(self)

    supports_splitting = True
    supports_coalescing = False  # waiting for works one by one costs nothing here
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:  # noqa: ARG002
        """False: the backend needs no memory of its own."""
        return False

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: the group is already connected."""

    @property
    def options(self) -> Any:
        """PyTorch's Backend.Options: the backend's name and the timeout."""
        return c10d.Backend.Options(self._backend, self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of calls without a timeout of their own."""
        self._timeout = timeout
        self._limit(timeout)
        self._cuda.set_timeout(timeout)

    def _limit(self, timeout: timedelta) -> None:
        """Set the group's timeout."""
        self._group.timeout_s = timeout.total_seconds()

    def _faulted(self) -> bool:
        """Whether the group has failed: every further call of it raises."""
        return self._group._planner.engine.faulted

    _set_default_timeout = set_timeout
    setTimeout = set_timeout  # noqa: N815

    def choice(self, collective: str, nbytes: int, algorithm: str | None = None) -> AlgorithmChoice:
        """The algorithm of a collective; see `unisono.Group.choice`."""
        return self._group.choice(collective, nbytes, algorithm)

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Do nothing, as other backends: torch.compile asks for time that a rank without its cache takes."""

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the engine counts from 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives issued."""
        return self._group.sequence

    def get_error(self) -> Any:
        """Return PyTorch's ErrorType: SUCCESS, or COMM_ERROR once the group is aborted or closed.

        SUCCESS after this rank's program called `abort` and has a handle: the group waits for `reconfigure`.
        """
        kinds: Any = c10d.ErrorType
        if self._revoked or isinstance(self._group, Unconnected):
            return kinds.SUCCESS
        failed = self._group.closed or self._faulted()
        return kinds.COMM_ERROR if failed else kinds.SUCCESS

    def _has_hooks(self) -> bool:
        return False

    def _register_on_completion_hook(self, hook: Any) -> None:  # noqa: ARG002
        """Refuse: PyTorch has such hooks for NCCL only, whose watchdog calls them."""
        raise RuntimeError(
            message(
                "unisono calls no hook when a Work completes: PyTorch has these for NCCL only",
                remedy="Use work.get_future().then(...).",
            )
        )

    def _wait_for_pending_works(self) -> None:
        """Do nothing: there are no hooks to wait for."""

    def _make(self, *place: Any, parent_ranks: ParentRanks = NO_PARENT, connects: bool = True) -> Any:
        """Make a group of this one's kind."""
        return ProcessGroupUnisono(
            *place, backend=self._backend, parent_ranks=parent_ranks, connects=connects
        )

    # ---- other ranks ----

    def _disconnect(self) -> None:
        """End the group of the present ranks; a failed one ends, too."""
        with suppress(UnisonoError):
            self._close()
        self._cuda.shutdown()
        self._unconnected()

    def _connect(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Make the group of the new ranks."""
        self._renumber(store, rank, size)
        self._join(store, timeout=timeout)
        self._renewed()

    def _take_over(self, group: NativeGroup, store: c10d.Store, counter: GroupCounter) -> None:
        """Be the process group of a group that has been made."""
        self._renumber(store, group.rank, group.size)
        self._timeout = timedelta(seconds=group.timeout_s)
        self._group_counter = counter
        self._take(group, self._group_counter.keys())
        self._renewed()

    def _renumber(self, store: c10d.Store, rank: int, size: int) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._global_ranks = list(range(size))
        self._revoked = False
        self._hooks.renew()

    def _renewed(self) -> None:
        self._renew_dispatcher_backend()
        c10d.renew_world(self, self._store, self._largest)

    def _largest(self, number: int) -> int:
        """Return the largest number of all ranks."""
        return int(self._group.all_reduce(number, op=ReduceOp.MAX))

    # ---- the end ----

    def shutdown(self) -> None:
        """Close the group; `destroy_process_group` calls this. Works that are not complete fail.

        An error of NCCL's shutdown is raised last, after the notice to the other ranks.
        """
        try:
            self._close()
        finally:
            try:
                self._cuda.shutdown()
            finally:
                self._leave_meetings()

    def abort(self) -> None:
        """Abort the group: every wait in it raises, on every rank. `reconfigure` makes it anew."""
        try:
            self._hooks.before_abort()
            self._group.abort()
        finally:
            try:
                self._cuda.abort()
            finally:
                self._revoked = self._endpoint is not None
                try:
                    self._close()
                finally:
                    self._cuda.shutdown()

    def _close(self) -> None:
        """Close the part that moves CPU memory."""
        if isinstance(self._group, Unconnected):
            return
        self._leave_survivors()
        healthy = not self._group.closed and not self._faulted()
        try:
            self._finalizer()
        finally:
            self._recent.clear()
        if healthy:  # otherwise the store's server may not answer
            self._group_counter.forget()


def world() -> ProcessGroupUnisono | None:
    """Unisono's process group in the default group, or None."""
    found: Any = dist.GroupMember.WORLD
    if found is not None and not isinstance(found, ProcessGroupUnisono):
        try:
            found = c10d.for_device(found, "cpu")
        except RuntimeError:  # the default group has no CPU backend
            return None
    return found if isinstance(found, ProcessGroupUnisono) else None


def _end(group: unisono.engine.group.Group, futures: WorkFutures, pid: int) -> None:
    try:
        group.close()
    finally:
        if (
            os.getpid() == pid
        ):  # a forked child's copy has no threads, and perhaps a lock that one of them held
            futures.close()


skip(ProcessGroupUnisono, Collectives, GroupCalls, UnisonoWork, TransferWork)
