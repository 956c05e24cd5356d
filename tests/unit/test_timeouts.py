"""What counts as a timeout, and how long the longest one is."""

import math
import socket
import sys
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import unisono as un
from effort import HANG_S
from loops import each
from unisono.engine.base.timeouts import LONGEST_S, seconds
from unisono.engine.bootstrap.peer_sockets import prepare
from unisono.engine.environment import env

LONG = [1e10, math.inf, timedelta.max, timedelta(days=10_000), 180_000_000.0, sys.float_info.max, 10**400]


@each(("given", "expected"), [(3, 3.0), (0.5, 0.5), (np.float32(2), 2.0), (timedelta(minutes=1), 60.0)])
def test_numbers_and_timedeltas_are_seconds(given: Any, expected: float) -> None:
    assert seconds(given) == expected


@each("given", LONG)
def test_what_is_too_long_to_wait_for_counts_as_the_longest(given: Any) -> None:
    assert seconds(given) == LONGEST_S
    assert 1000 * LONGEST_S < 2**31, "poll() takes it in milliseconds"


@each("given", [0, -1, -(10**400), math.nan, -math.inf, timedelta.min])
def test_no_time_and_less_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout is .* s, expected a positive number of seconds"):
        seconds(given)


@each("given", ["3", b"3", True, None, [1.0], 1j])
def test_other_types_are_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"linger_s is .*, expected a number of seconds or a timedelta"):
        seconds(given, name="linger_s")


@each("text", ["1e10", "inf", "1e400"])
def test_the_environment_follows_the_same_rule(text: str) -> None:
    found = env.read({"UNISONO_TIMEOUT_S": text, "UNISONO_PEER_TIMEOUT_S": text})
    assert (found.timeout_s, found.peer_timeout_s) == (LONGEST_S, LONGEST_S)


def test_a_connection_takes_the_longest_peer_timeout() -> None:
    with socket.socket() as sock:
        prepare(sock, "control", peer_timeout_s=LONGEST_S, buffer_bytes=0)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * LONGEST_S


@pytest.mark.parametrize("wait_s", [1e10, math.inf])
def test_a_store_waits_for_as_long(wait_s: float) -> None:
    with (
        un.TCPStore("127.0.0.1", 0, is_server=True, timeout_s=wait_s, linger_s=wait_s) as store,
        un.TCPStore("127.0.0.1", store.port, timeout_s=wait_s) as other,
    ):
        found: list[bytes] = []
        waiting = threading.Thread(target=lambda: found.append(other.get("k")))
        waiting.start()
        assert not store.check(["k"])
        store.set("k", b"v")
        waiting.join(HANG_S)
        assert found == [b"v"]
