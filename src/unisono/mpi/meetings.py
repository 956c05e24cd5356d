"""Ranks of two jobs, or of two communicators, that form one more group: ports, their names, sockets.

A rank serves a store, in which all of them meet. The group's ranks are those of one side, then those of the
other one; an intercommunicator has both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono.engine.environment import env
from unisono.engine.store import PrefixStore, Store, TCPStore
from unisono.errors import StoreError
from unisono.mpi import constants, object_schedules
from unisono.mpi.addresses import check_root
from unisono.mpi.comm_state import CommState, handle_of
from unisono.mpi.context import PARENT_CONTEXT, Contexts
from unisono.mpi.ending import worlds
from unisono.mpi.errors import Exception
from unisono.mpi.progress import complete
from unisono.mpi.transport import World

if TYPE_CHECKING:
    from unisono.engine.store import StoreServer

AWAITED_S = 10.0
_numbers = itertools.count(1 << 20)  # of processes that are in no world of this one before
served: dict[StoreServer, list[Any]] = {}
"""The stores of this process, each with the processes that it has started for it."""
_ports: dict[str, tuple[str, int]] = {}


def Open_port(info: Any = None) -> str:  # noqa: ARG001
    """A new name under which the ranks of this job, or of another one, reach this rank."""
    server = serve(_own())
    name = f"{server.host}:{server.port}"
    _ports[name] = server.host, server.port
    return name


def Close_port(port_name: str) -> None:
    """Nobody connects to it any more; who has goes on."""
    if _ports.pop(port_name, None) is None:
        raise Exception(constants.ERR_PORT, f"this rank has opened no port {port_name!r}")


def Publish_name(service_name: str, port_name: str, info: Any = None) -> None:  # noqa: ARG001
    """Tell all ranks of this job the name of a port."""
    _names().set(service_name, port_name.encode())


def Unpublish_name(service_name: str, port_name: str, info: Any = None) -> None:  # noqa: ARG001
    """End `Publish_name`."""
    if not _names().delete_key(service_name):
        raise Exception(constants.ERR_SERVICE, f"nobody has published {service_name!r}")


def Lookup_name(service_name: str, info: Any = None) -> str:  # noqa: ARG001
    """The name of a port that a rank of this job has published."""
    if not _names().check([service_name]):
        raise Exception(constants.ERR_NAME, f"nobody has published {service_name!r}")
    return bytes(_names().get(service_name)).decode()


def _own() -> World:
    if not worlds:
        raise Exception(constants.ERR_OTHER, "MPI is not initialized, or finalized already")
    return worlds[0]


def _names() -> Store:
    store, _ = _own().group._meeting()
    return PrefixStore("mpi/names", store)


def pair(state: CommState, port: Any, root: int, accepts: bool) -> Any:
    """An intercommunicator with the ranks that call the other one of Accept and Connect."""
    own, other = ("accept", "connect") if accepts else ("connect", "accept")

    def ask() -> tuple[tuple[str, int], int, int]:
        host, _, number = str(port).rpartition(":")
        if not number.isdecimal() or (accepts and port not in _ports):
            raise OSError(f"there is no port {port!r}")
        address = host, int(number)
        store = store_at(address)
        ticket = store.add(own, 1)
        store.set(f"{own}/{ticket}", str(state.size).encode())
        theirs = int(store.get(f"{other}/{ticket}", timeout_s=state.world.group.timeout_s))
        return address, ticket, theirs

    address, ticket, theirs = by_root(state, root, ask, constants.ERR_PORT)
    return meet(state, PrefixStore(f"pair/{ticket}", store_at(address)), accepts, theirs)


def join(alone: CommState, fd: int) -> Any:
    """An intercommunicator with the process at the other end of a socket."""
    mine = Open_port()
    with socket.socket(fileno=os.dup(fd)) as end:
        end.sendall(f"{mine}\n".encode())
        theirs = b""
        while not theirs.endswith(b"\n"):
            piece = end.recv(1)
            if not piece:
                raise Exception(constants.ERR_OTHER, "the other end of the socket was closed")
            theirs += piece
    port = min(mine, theirs[:-1].decode())
    made = pair(alone, port, 0, port == mine)
    Close_port(mine)
    return made


def by_root(state: CommState, root: int, act: Callable[[], Any], code: int) -> Any:
    """What an act of the root gives, on all ranks; or the error that it raises."""
    root, told = check_root(root, state.size), None
    if state.rank == root:
        try:
            told = act()
        except (OSError, StoreError) as error:
            told = str(error)
    told = complete(object_schedules.broadcast(state.lane(), told, root))
    if isinstance(told, str):
        raise Exception(code, told)
    return told


def serve(world: World) -> StoreServer:
    """A store of this process, which all ranks of the job reach."""
    group = world.group
    host = "127.0.0.1"
    if len({group.host_of(rank) for rank in range(group.size)}) > 1:
        from unisono.engine.bootstrap.interfaces import local_addresses

        settings = env.read(strict=False)
        host = local_addresses(settings.master_addr, settings)[0]
    from unisono.engine.publishing import meeting  # few programs serve

    server = meeting.serve(host)
    served[server] = []  # subgroups of both sides meet in it
    return server


def store_at(address: tuple[str, int]) -> TCPStore:
    """A client of such a store."""
    from unisono.engine.publishing import meeting

    return meeting.store_at(address)


def meet(state: CommState, store: Store, first: bool, others: int) -> Any:
    """An intercommunicator. first: the ranks of this side come before the `others`."""
    from unisono.engine.group.init import form

    size, total = state.size, state.size + others
    mine = range(size) if first else range(others, total)
    theirs = range(size, total) if first else range(others)
    settings = env.read(strict=False)._replace(status_fd=None, local_rank=None, local_world_size=None)
    group = form(
        None, store=store, rank=mine[state.rank], world_size=total, timeout_s=settings.timeout_s,
        settings=settings, group_name="mpi", reproducible=False,
    )  # fmt: skip
    group.timeout_s = state.world.group.timeout_s
    known, unknown = state.world.ids_of(state.ranks), [next(_numbers) for _ in theirs]
    world = World(group, [*known, *unknown] if first else [*unknown, *known], ends_with=store.close)
    world.parent = CommState(world, Contexts(PARENT_CONTEXT), mine, PARENT_CONTEXT, 1, theirs)
    return handle_of(world.parent)


def end_all() -> None:
    """Wait for the processes that this one has started, whose subgroups meet in its stores; end these.

    Raises:
        Exception: one of them has failed, or not ended within UNISONO_TIMEOUT_S if that is set.
    """
    settings = env.read(strict=False)
    limit_s = settings.timeout_s if "timeout_s" in settings.origins else None
    started = [one for processes in served.values() for one in processes]
    codes = [_awaited(place, one, limit_s) for place, one in enumerate(started)]
    for server in served:
        server.close()
    served.clear()
    for place, code in enumerate(codes):
        if code:
            text = f"process {place} that this rank has started ended with {code}"
            raise Exception(constants.ERR_SPAWN, text)


def _awaited(place: int, one: subprocess.Popen[bytes], limit_s: float | None) -> int:
    """The exit status of a process. After AWAITED_S this rank says for which one it waits."""
    who = f"process {place} (pid {one.pid}) that this rank has started"
    end = None if limit_s is None else time.monotonic() + limit_s
    with contextlib.suppress(subprocess.TimeoutExpired):
        return one.wait(AWAITED_S if limit_s is None else min(AWAITED_S, limit_s))
    warnings.warn(f"Finalize waits for the end of {who}", RuntimeWarning, stacklevel=2)
    try:
        return one.wait(None if end is None else max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        text = f"Finalize: {who} has not ended within UNISONO_TIMEOUT_S={limit_s:g}"
        raise Exception(constants.ERR_SPAWN, text) from None
