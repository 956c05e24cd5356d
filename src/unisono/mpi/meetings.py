"""Ranks of two jobs that form one more group: ports, their names, sockets, and processes that a rank starts.

A rank serves a store, in which all of them meet. The group's ranks are those of one side, then those of the
other one; an intercommunicator has both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono.engine.environment import env
from unisono.engine.store import PrefixStore, Store, TCPStore
from unisono.errors import RendezvousError, StoreError
from unisono.mpi import constants, object_schedules
from unisono.mpi.comm_state import PARENT_CONTEXT, CommState, Contexts, handle_of
from unisono.mpi.errors import Exception, check_root, whole
from unisono.mpi.progress import complete
from unisono.mpi.transport import World, worlds

if TYPE_CHECKING:
    from unisono.engine.store import StoreServer

AWAITED_S = 10.0
_numbers = itertools.count(1 << 20)  # of processes that are in no world of this one before
served: dict[StoreServer, list[Any]] = {}
"""The stores of this process, each with the processes that it has started for it."""
_ports: dict[str, tuple[str, int]] = {}


def Open_port(info: Any = None) -> str:
    """A new name under which the ranks of this job, or of another one, reach this rank."""
    server = serve(_own())
    name = f"{server.host}:{server.port}"
    _ports[name] = server.host, server.port
    return name


def Close_port(port_name: str) -> None:
    """Nobody connects to it any more; who has goes on."""
    if _ports.pop(port_name, None) is None:
        raise Exception(constants.ERR_PORT, f"this rank has opened no port {port_name!r}")


def Publish_name(service_name: str, port_name: str, info: Any = None) -> None:
    """Tell all ranks of this job the name of a port."""
    _names().set(service_name, port_name.encode())


def Unpublish_name(service_name: str, port_name: str, info: Any = None) -> None:
    """End `Publish_name`."""
    if not _names().delete_key(service_name):
        raise Exception(constants.ERR_SERVICE, f"nobody has published {service_name!r}")


def Lookup_name(service_name: str, info: Any = None) -> str:
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


LOOK_S = 0.05
_LAUNCHERS = (
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "UNISONO_STATUS_FD",
    "UNISONO_REPORT_FD", "UNISONO_ELASTIC", "UNISONO_JOIN",
)  # fmt: skip
"""What the launcher tells its own ranks alone."""


def spawn(state: CommState, orders: Callable[[], list[tuple[Any, Any, int, Any]]], root: int) -> Any:
    """(an intercommunicator with the new ranks, how many each order has). orders: asked on the root alone.

    Raises:
        Exception: a process cannot be started, or has ended before it was a rank.
    """
    met = threading.Event()
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[tuple[str, int], list[int]]:
        given = orders()
        _forget_ended()
        server, counts = serve(state.world), [count for _, _, count, _ in given]
        served[server] = processes
        place = f"{server.host}:{server.port}"
        environ = {name: text for name, text in env.copy().items() if name not in _LAUNCHERS}
        environ |= {"UNISONO_STORE": place, "MASTER_ADDR": server.host, "MASTER_PORT": str(server.port)}
        environ |= {"WORLD_SIZE": str(state.size + sum(counts)), "UNISONO_PARENTS": str(state.size)}
        _start(given, environ, state.size, processes)
        threading.Thread(target=_watch, args=(processes, server, met), daemon=True).start()
        return (server.host, server.port), counts

    address, counts = by_root(state, root, start, constants.ERR_SPAWN)
    try:
        return meet(state, store_at(address), True, sum(counts)), counts
    except (StoreError, RendezvousError) as error:
        text = "a new process did not become a rank"
        for place, one in enumerate(processes):
            code = one.poll()
            if code is not None:
                text = f"new process {place} (pid {one.pid}) ended with {code} before it was a rank"
                break
        _end(processes)
        raise Exception(constants.ERR_SPAWN, text) from error
    finally:
        met.set()


def _watch(processes: list[subprocess.Popen[bytes]], server: StoreServer, met: threading.Event) -> None:
    """A process that ends before all have met ends their meeting."""
    while not met.wait(LOOK_S):
        if any(one.poll() is not None for one in processes):
            server.close()
            return


def _forget_ended() -> None:
    """End the stores of processes that have ended well."""
    for server, processes in list(served.items()):
        if processes and all(one.poll() == 0 for one in processes):
            del served[server]
            server.close()


def _start(
    orders: list[tuple[Any, Any, int, Any]], environ: dict[str, str], rank: int, processes: list[Any]
) -> None:
    for command, args, count, info in orders:
        argv = [os.fspath(command), *map(os.fspath, args)]
        hints = dict(info.items()) if info else {}
        for _ in range(count):
            try:
                one = subprocess.Popen(
                    argv,
                    env={**environ, "RANK": str(rank)},
                    cwd=hints.get("wdir"),
                    stdin=subprocess.DEVNULL,
                )
            except OSError:
                _end(processes)
                raise
            processes.append(one)
            rank += 1


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for one in processes:
        one.kill()
        one.wait()
    processes.clear()


def orders_of(
    command: Any, args: Any, maxprocs: Any, info: Any, several: bool
) -> Callable[[], list[tuple[Any, Any, int, Any]]]:
    """The orders of `Spawn`, or of `Spawn_multiple`. Raises ValueError when it is called."""

    def check() -> list[tuple[Any, Any, int, Any]]:
        if not several:
            return [(command, _arguments(args), _count(maxprocs), info)]
        commands = _each("command", command, None)
        size = len(commands)
        every_args = [()] * size if args is None else _each("args", args, size)
        counts = _each("maxprocs", [maxprocs] * size if isinstance(maxprocs, int) else maxprocs, size)
        infos = _each("info", info if isinstance(info, list | tuple) else [info] * size, size)
        parts = zip(commands, map(_arguments, every_args), map(_count, counts), infos, strict=True)
        return list(parts)

    return check


def _each(name: str, given: Any, size: int | None) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != (size or len(given)):
        raise ValueError(f"{name}: expecting a sequence{f' of {size} items' if size else ''}")
    return list(given)


def _arguments(given: Any) -> Sequence[Any]:
    return () if given is None else (given,) if isinstance(given, str) else given


def _count(given: Any) -> int:
    found = whole(given, "maxprocs")
    if found < 1:
        raise Exception(constants.ERR_ARG, f"maxprocs is {found}")
    return found
