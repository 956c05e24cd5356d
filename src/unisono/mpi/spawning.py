"""Processes that a rank starts. They have the group with the ranks that started them as their world."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

from unisono.engine.environment import env
from unisono.engine.store import StoreServer
from unisono.errors import RendezvousError, StoreError
from unisono.mpi import constants
from unisono.mpi.comm_state import CommState
from unisono.mpi.errors import Exception, whole
from unisono.mpi.meetings import by_root, meet, serve, served, store_at

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
