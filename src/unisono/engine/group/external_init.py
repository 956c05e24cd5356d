"""`init_process_group` for backends other than the engine, and a rendezvous address that MPI distributes."""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Iterator
from datetime import timedelta

from unisono.engine.backends.availability import REMEDIES, why_not
from unisono.engine.backends.driver import LibraryDriver
from unisono.engine.base.authentication import JobToken, make_token
from unisono.engine.bootstrap.rendezvous import Rendezvous, rendezvous
from unisono.engine.environment import env
from unisono.engine.group.external import ExternalGroup
from unisono.engine.group.work import seconds
from unisono.engine.store import Store
from unisono.engine.store.address import reserve
from unisono.errors import NotSupported, RendezvousError, message

MPI_LAUNCHERS = ("Open MPI", "MPICH/PMI")


def external_group(
    backend: str,
    init_method: str | None,
    *,
    timeout: float | timedelta | None,
    world_size: int,
    rank: int,
    store: Store | None,
    group_name: str,
    reproducible: bool,
) -> ExternalGroup:
    """Make a group over MPI, Gloo or NCCL. See `init_process_group`.

    Raises:
        NotSupported: the backend is not available, or does not have an argument.
        ValueError, RendezvousError: as `init_process_group`.
    """
    if reproducible:
        raise _unsupported(backend, "reproducible=True", "the library chooses the order of contributions")
    settings = env.read(strict=False)
    if backend == "mpi":
        given = {"init_method=": init_method, "store=": store, "timeout=": timeout}
        for what, value in given.items():
            if value is not None:
                why = "MPI has no deadlines" if what == "timeout=" else "MPI's ranks have met in mpiexec"
                raise _unsupported(backend, what, why)
        driver = mpi_driver(world_size, rank, settings)
        return ExternalGroup(driver, group_name, float("inf"))
    timeout_s = seconds(timeout, settings.timeout_s)
    make = _torch(backend)
    own_rendezvous = rendezvous(
        init_method,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout_s=timeout_s,
        settings=settings,
        name=group_name,
    )
    try:
        return ExternalGroup(
            _open_driver(make, own_rendezvous, timeout_s), group_name, timeout_s, rendezvous=own_rendezvous
        )
    except BaseException:
        own_rendezvous.close()
        raise


def mpi_driver(world_size: int, rank: int, settings: env.Settings) -> LibraryDriver:
    """The driver of all of MPI's ranks; -1: as MPI says.

    Raises:
        NotSupported: there is no mpi4py, or no library of MPI.
        RendezvousError, ValueError: MPI knows other ranks.
    """
    from unisono.engine.backends.mpi import MpiDriver  # NumPy, and mpi4py when a driver is made

    try:
        driver = MpiDriver()
    except (ImportError, RuntimeError) as error:  # no mpi4py; or it finds no library of MPI
        raise _missing_library("mpi", str(error).partition("\n")[0]) from None
    said = settings.world_size if world_size == -1 else world_size
    if said is not None and said != driver.size:
        observed = f"MPI knows {driver.size} rank{'s' if driver.size > 1 else ''}"
        remedy = f"Start them with MPI's own launcher: mpiexec -n {said} python script.py."
        raise RendezvousError(message(f"{said} ranks were announced", observed=observed, remedy=remedy))
    if rank not in (-1, driver.rank):
        raise ValueError(f"the argument rank={rank} and MPI's rank {driver.rank} disagree")
    return driver


def _torch(backend: str) -> type[LibraryDriver]:
    """The class of the backend's drivers."""
    try:
        import unisono.engine.backends.pytorch as drivers
    except ImportError as error:
        raise _missing_library(backend, str(error)) from None
    if missing := why_not(backend):
        raise _missing_library(backend, missing)
    found: type[LibraryDriver] = drivers.GlooDriver if backend == "gloo" else drivers.NcclDriver
    return found


def _open_driver(make: type[LibraryDriver], own_rendezvous: Rendezvous, timeout_s: float) -> LibraryDriver:
    try:
        return make(own_rendezvous.store, own_rendezvous.rank, own_rendezvous.world_size, timeout_s)  # type: ignore[call-arg]
    except RuntimeError as error:
        what = f"the ranks have met, and {make.name} cannot connect them"
        raise RendezvousError(message(what, observed=str(error).partition("\n")[0])) from error


def started_by_mpi() -> bool:
    """Whether `mpiexec` has started this process, no rendezvous address is set, and mpi4py can be loaded."""
    settings = env.read(strict=False)
    led = settings.store_address is not None or settings.master_addr is not None
    if led or settings.launcher not in MPI_LAUNCHERS:
        return False
    try:
        importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError):
        return False
    return True


@contextlib.contextmanager
def mpi_rendezvous() -> Iterator[tuple[str, JobToken]]:
    """The init_method of a store on rank 0, and the job's token. MPI broadcasts both, on any hosts.

    The token is that of rank 0's environment, or a new one. Meet inside: until then rank 0 keeps the port.
    """
    comm = importlib.import_module("mpi4py.MPI").COMM_WORLD
    hosts = comm.allgather(socket.gethostname())
    offer = None
    with contextlib.ExitStack() as held:
        if comm.Get_rank() == 0:
            host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
            port = held.enter_context(reserve(host)).getsockname()[1]
            offer = f"tcp://{host}:{port}", bytes(env.read(strict=False).token or make_token())
        url, token = comm.bcast(offer)
        yield f"{url}?rank={comm.Get_rank()}&world_size={comm.Get_size()}", JobToken(token)


def _unsupported(backend: str, what: str, why: str) -> NotSupported:
    text = message(f"backend {backend!r} does not support {what}", observed=why, remedy="Leave it out.")
    return NotSupported(text, backend=backend, what=what)


def _missing_library(backend: str, why: str) -> NotSupported:
    text = message(f"backend {backend!r} is not available here", observed=why, remedy=REMEDIES[backend])
    return NotSupported(text, backend=backend, what="anything")
