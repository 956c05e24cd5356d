"""The bench's end of a worker's connection."""

from __future__ import annotations

import socket
import struct

import pytest

from unisono.commands.bench import worker_group


def test_a_worker_that_stops_in_its_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "GAP_TIMEOUT_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs:
        stopped = worker_group.WorkerGroup("memcpy", 1)
        stopped.connections, stopped.pids = [worker_group.connection_over(ours)], [4121]
        theirs.sendall(struct.pack("!i", 100) + b"{")
        with pytest.raises(
            worker_group.BenchError, match=r"memcpy rank 0/1 \(pid 4121\) .*the middle of its answer"
        ):
            stopped.ask({"do": "check"})
