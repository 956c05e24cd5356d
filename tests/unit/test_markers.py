"""A stream between two ranks passes to the next membership: each end drops what comes before the marker."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest

from effort import HANG_S, judge_time
from unisono import _native

MARKER = bytes(range(32))


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


def passing(theirs: Callable[[socket.socket], object]) -> tuple[float, bytes]:
    """The seconds until the markers have passed, and the first byte that is left to read."""
    ours, other = pair()
    with ours, other:
        thread = threading.Thread(target=theirs, args=(other,))
        thread.start()
        began = time.monotonic()
        _native.pass_markers([ours.fileno()], MARKER, HANG_S)
        took = time.monotonic() - began
        thread.join()
        ours.settimeout(HANG_S)
        return took, ours.recv(1)


@pytest.mark.parametrize("stale", [0, 1, 31, 32, 33, 65_536, 200_000, 3_000_000])
def test_what_comes_before_the_marker_is_dropped(stale: int) -> None:
    took, left = passing(lambda other: other.sendall(bytes(stale) + MARKER + b"x"))
    judge_time(took, 4)
    assert left == b"x"


def test_a_marker_that_comes_in_pieces() -> None:
    def in_pieces(other: socket.socket) -> None:
        for part in (b"old" + MARKER[:5], MARKER[5:20], MARKER[20:] + b"x"):
            time.sleep(0.05)
            other.sendall(part)

    took, left = passing(in_pieces)
    judge_time(took, 4)
    assert left == b"x"


@pytest.mark.parametrize("stale", [0, 1, 31, 100])
@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_an_end_that_dies_before_its_marker_is_not_waited_for(stale: int, pause_s: float) -> None:
    def dies(other: socket.socket) -> None:
        other.sendall(bytes(stale))
        time.sleep(pause_s)
        other.shutdown(socket.SHUT_WR)

    took, _ = passing(dies)
    judge_time(took, 4)


@pytest.mark.parametrize("nbytes", [0, 1 << 16, 1 << 18])
def test_a_connection_that_is_full_of_old_bytes(nbytes: int) -> None:
    """A few bytes that stay in the kernel hold a packet of 64 KiB there, and the window stays closed."""
    ours, other = pair()
    with ours, other:
        if nbytes:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)
        other.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                other.send(bytes(100_000))
        time.sleep(0.3)  # the window is closed
        ends = [
            threading.Thread(target=_native.pass_markers, args=([one.fileno()], MARKER, HANG_S))
            for one in (ours, other)
        ]
        began = time.monotonic()
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        judge_time(time.monotonic() - began, 4)
        other.sendall(b"x")
        ours.settimeout(HANG_S)
        assert ours.recv(1) == b"x"
