"""The bench's end of a worker's connection."""

import socket
import struct

import pytest

from unisono.commands.bench import side


def test_a_worker_that_stops_in_its_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side, "GAP_TIMEOUT_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs:
        stopped = side.Side("memcpy", 1)
        stopped.connections, stopped.pids = [side.connection_over(ours)], [4121]
        theirs.sendall(struct.pack("!i", 100) + b"{")
        with pytest.raises(side.BenchError, match=r"memcpy rank 0/1 \(pid 4121\) .*the middle of its answer"):
            stopped.ask({"do": "check"})
