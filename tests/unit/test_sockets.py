"""The options of connections between hosts."""

from __future__ import annotations

import socket

import pytest

from unisono.engine.bootstrap.peer_sockets import TCP_RTO_MAX_MS, prepare


@pytest.mark.parametrize(("peer_timeout_s", "longest_ms"), [(10.0, 1250), (2.0, 1000), (60.0, 7500)])
def test_what_was_lost_is_sent_again_while_the_peer_is_not_given_up(
    peer_timeout_s: float, longest_ms: int
) -> None:
    with socket.socket() as sock:
        try:
            sock.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
        except OSError:
            pytest.skip("a kernel before Linux 6.15 bounds no retransmission")
        prepare(sock, "data", peer_timeout_s=peer_timeout_s, buffer_bytes=0)
        found = sock.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
        assert abs(found - longest_ms) <= 10, "milliseconds, in the kernel's ticks"
