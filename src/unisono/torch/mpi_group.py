"""The backend "unisono-mpi" of `torch.distributed`: an MPI library moves the bytes, through mpi4py.

The ranks are those that `mpiexec` has started. The group is `unisono.Group` over the driver of
`backend="mpi"`; PyTorch's side is that of the backend "unisono". docs/pytorch.md says what MPI does not have.
"""

from __future__ import annotations

import atexit
import zlib
from contextlib import ExitStack
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING, Any

from torch.distributed.rendezvous import rendezvous as rendezvous_of_torch

from unisono.engine.backends.torch_store import EngineStore, part
from unisono.engine.bootstrap.rendezvous import Rendezvous, rendezvous
from unisono.engine.environment import env
from unisono.engine.group.external import ExternalGroup
from unisono.engine.group.external_init import mpi_driver, mpi_rendezvous, started_by_mpi
from unisono.errors import NotSupported, message
from unisono.torch_internals.dynamo import skip

from .monitored_barrier import MonitoredBarrier
from .process_group import ProcessGroupUnisono, world
from .subgroups import NO_PARENT, GroupCounter, ParentRanks

LIMIT = timedelta(minutes=30)
"""PyTorch's own timeout, which it does not hand to the backend "mpi"."""

if TYPE_CHECKING:
    from collections.abc import Callable

    from unisono.torch_internals import c10d

# mypy must pass with and without PyTorch installed.
# mypy: disallow-subclassing-any=False, warn-unused-ignores=False


class ProcessGroupMpi(ProcessGroupUnisono):
    """`torch.distributed` over one communicator of MPI. Calls have no deadline: MPI has none."""

    own_name = "unisono-mpi"
    supports_shrinking = supports_reconfigure = False  # type: ignore[assignment]

    def _join(
        self,
        store: c10d.Store,
        parent_ranks: ParentRanks = NO_PARENT,
        timeout: timedelta | None = None,  # noqa: ARG002
    ) -> None:
        """Make the group of MPI's ranks, or of some of them: its members alone make it.

        Raises:
            NotSupported: there is no mpi4py, or no library of MPI; or the world's ranks are not MPI's.
            RendezvousError, ValueError: MPI knows other ranks.
        """
        parent = parent_ranks.group
        self._group_counter = GroupCounter(store, self._rank, parent)
        with self._group_counter.attempt():
            driver: Any
            if parent is None:
                driver = mpi_driver(self._size, self._rank, env.read(strict=False))
            else:
                if not isinstance(parent, ProcessGroupMpi):
                    what = "a group over MPI in a world that is not"
                    text = message(what, remedy='Write init_process_group("unisono-mpi").')
                    raise NotSupported(text, backend="mpi", what=what)
                whole: Any = parent._group
                name = f"{self._group_name} {self._group_counter.number}"
                driver = whole._planner.driver.members(parent_ranks.ranks, zlib.crc32(name.encode()))
            group: Any = ExternalGroup(driver, self._group_name, inf, tuple(self._global_ranks))
        self._take(group, self._group_counter.keys())

    def _take(self, group: Any, keys: c10d.Store) -> None:
        """See `ProcessGroupUnisono`. MPI does not say where a late rank is."""
        super()._take(group, keys)
        nobody = "by nobody: MPI keeps no record"
        self._monitored = MonitoredBarrier(keys, self._rank, self._size, lambda _: nobody)

    def _run(self, method: Callable[..., Any], opts: Any, *args: Any, **kwargs: Any) -> Any:
        """See `GroupCalls._run`. The call's timeout is left out."""
        opts.timeout = timedelta(0)
        return super()._run(method, opts, *args, **kwargs)

    def _faulted(self) -> bool:
        """See `ProcessGroupUnisono`: MPI ends the job where a rank fails."""
        return False

    def _limit(self, timeout: timedelta) -> None:
        """Keep PyTorch's timeout for the store only."""

    def _make(self, *place: Any, parent_ranks: ParentRanks = NO_PARENT, connects: bool = True) -> Any:
        """Make a group of this one's kind."""
        return ProcessGroupMpi(*place, backend=self._backend, parent_ranks=parent_ranks, connects=connects)


_SAME_RANKS = "the ranks of a group are those that mpiexec has started"
REFUSED = {
    "abort": "it cannot end the operations of other ranks",
    "shrink": _SAME_RANKS,
    "reconfigure": _SAME_RANKS,
    "get_reconfigure_handle": _SAME_RANKS,
    "merge_remote_group": _SAME_RANKS,
}
"""By the method's name: why MPI does not have it."""


def _refusing(name: str, why: str) -> Callable[..., Any]:
    def call(self: ProcessGroupMpi, *_: Any, **__: Any) -> Any:
        group: Any = self._group
        group._planner.refuse(f"{name}()", why)

    call.__name__, call.__doc__ = name, f"Raise NotSupported: {why}."
    return call


for _name, _why in REFUSED.items():
    setattr(ProcessGroupMpi, _name, _refusing(_name, _why))


def create(given: Any, backend_options: Any) -> ProcessGroupMpi:  # noqa: ARG001
    """Make a group of the backend "unisono-mpi"; see `process_group.create`."""
    ranks = given.global_ranks_in_group
    name = f"group {given.group_id}" if ranks else "world"
    return ProcessGroupMpi(
        given.store,
        given.group_rank,
        given.group_size,
        given.timeout,
        name,
        backend=ProcessGroupMpi.own_name,
        parent_ranks=ParentRanks(world(), ranks) if ranks else NO_PARENT,
    )


def create_for_mpi(ranks: list[int]) -> ProcessGroupUnisono:
    """Make a group of the backend "mpi": over an MPI library under `mpiexec`, otherwise over the engine.

    Args:
        ranks: of the world; none: the world itself.
    """
    everybody = world()
    if not ranks or everybody is None:
        store, rank, size = next(rendezvous_of_torch("env://", timeout=LIMIT))
        kind = ProcessGroupMpi if started_by_mpi() else ProcessGroupUnisono
        return kind(part(store, "mpi/"), rank, size, LIMIT, "world", backend="mpi")
    name = ",".join(map(str, ranks))
    place = (part(everybody.get_group_store(), name), ranks.index(everybody.rank()), len(ranks))
    group: ProcessGroupUnisono = everybody._make(
        *place, everybody._timeout, f"group {name}", parent_ranks=ParentRanks(everybody, ranks)
    )
    return group


def launched_store(timeout_s: float) -> tuple[c10d.Store, int, int] | None:
    """The store, rank and number of ranks where a launcher has said them otherwise than by RANK; or None.

    The store is served by rank 0 until its process ends.

    Raises:
        RendezvousError: the ranks did not meet.
    """
    settings = env.read(strict=False)
    if not settings.launcher:
        return None
    with ExitStack() as held:
        where = None
        if started_by_mpi():
            where, token = held.enter_context(mpi_rendezvous())
            settings = settings._replace(token=token)
        found = rendezvous(
            where, store=None, rank=-1, world_size=-1, timeout_s=timeout_s, settings=settings, name="torch"
        )
    store = EngineStore(found.store)
    atexit.register(_close, found, store)
    return store, found.rank, found.world_size


def _close(found: Rendezvous, store: EngineStore) -> None:  # noqa: ARG001 (C++ code does not keep a Python object)
    found.close()


skip(ProcessGroupMpi)
