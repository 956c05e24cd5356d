"""An engine that cannot be made closes the descriptors that it was given."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from effort import HANG_S
from unisono import _native

KINDS = ("control", "data", "messages")


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def ends(far: socket.socket) -> bool:
    """Whether the connection ends, perhaps after a close message."""
    with far:
        far.settimeout(HANG_S)
        return any(not far.recv(1 << 16) for _ in range(3))


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process can open `count` more descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, limits[1]))
    try:
        while True:
            try:
                fillers.append(os.dup(fillers[0]))
            except OSError:
                break
        for _ in range(count):
            os.close(fillers.pop())
        yield
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("left", [0, 1, 2])  # it needs two events and one epoll instance
def test_sockets_are_closed_when_descriptors_run_out(left: int) -> None:
    pairs = [connected() for _ in KINDS]
    region = _native.Region(-1, 1, 1 << 16, True)
    lists = {kind: [-1, near.detach()] for kind, (near, _) in zip(KINDS, pairs, strict=True)}
    joined = _native.Connections(places=[0, -1], hosts=[0, 1], **lists)
    with descriptors_left(left), pytest.raises(OSError, match="Too many open files"):
        _native.Engine(region, 0, [-1, -1], -1, 2, 0.0, 1 << 18, connections=joined)
    for _, far in pairs:
        assert ends(far)


def test_pidfds_are_closed_when_an_argument_is_refused() -> None:
    pidfd = os.pidfd_open(os.getpid())
    region = _native.Region(-1, 2, 1 << 16, True)
    with pytest.raises(ValueError, match="name every rank once"):
        _native.Engine(region, 0, [-1, pidfd, -1], -1, 2, 0.0, 1 << 18)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pidfd)


def test_sockets_that_no_engine_took_are_closed() -> None:
    near, far = connected()
    _native.Connections(places=[0, -1], hosts=[0, 1], control=[-1, near.detach()], data=[], messages=[])
    assert ends(far)


def test_a_parameter_without_a_name_is_refused() -> None:
    with pytest.raises((TypeError, RuntimeError)):
        _native.collective(len, [None] * 13, [(1, 0, True)], 0)  # type: ignore[list-item]
