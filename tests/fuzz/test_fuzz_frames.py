"""Bytes from a peer: fuzzed against real ranks, stores and hand-shakes; and what is said of a bad frame."""

import importlib.util
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from effort import HANG_S, times
from loops import each
from python_runs import ran

PROGRAM = Path(__file__).with_name("frames.py")
FRAMES = int(os.environ.get("FUZZ_FRAMES", times(usual=2_000, long=100_000)))
FRAME_NBYTES = 1004  # of every control frame


def fuzzer() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz_frames", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def control(form: str, *begin: int) -> bytes:
    """A control frame that begins with these numbers."""
    return struct.pack(form, *begin).ljust(FRAME_NBYTES, b"\0")


@pytest.mark.timeout(HANG_S + FRAMES // 10)
def test_no_frame_crashes_a_rank_or_takes_its_memory() -> None:
    done = ran(PROGRAM, "--frames", FRAMES, limit_s=HANG_S + FRAMES // 10)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr[-4000:]}"


@each(
    ("kind", "frame", "what"),
    [
        ("messages", struct.pack("<QiI", (1 << 63) + 5, 0, 9), "an impossible length (9223372036854775813)"),
        ("messages", struct.pack("<QiI", 7, 0, 9), "an impossible length (7)"),
        ("messages", struct.pack("<QiI", 8, -2, 9), "a negative tag"),
        ("messages", struct.pack("<QiI", 8, 0, 99), "an unknown element type (99)"),
        ("messages", struct.pack("<QiI", 8, 0, (1 << 31) + 9), "a zero-copy message"),
        ("data", struct.pack("<QQ", 80, 2) + bytes(80), "a fingerprint that no operation has (2)"),
        ("data", struct.pack("<QQ", 1 << 63, 1), "an impossible length"),
        ("control", control("<I", 77), "an unknown kind of frame (77)"),
        ("control", control("<IIii", 3, 2, 1, 9), "a rank outside the group (9)"),
        ("control", control("<IIii", 3, 99, 1, 1), "an unknown kind of fault (99)"),
        ("control", control("<I", 4) * 2, "a frame after the close message"),
    ],
)  # fmt: skip
def test_a_bad_frame_ends_the_group_and_its_sender_is_named(kind: str, frame: bytes, what: str) -> None:
    rank = fuzzer().Rank()
    rank.group.timeout_s = 20.0
    try:
        rank.ends[kind].setblocking(True)
        rank.ends[kind].sendall(frame)
        with pytest.raises(un.Aborted) as raised:
            if kind == "messages":
                rank.group.recv(np.zeros(1), 1)
            else:
                rank.group.all_reduce(np.zeros(10))
        assert f"its {kind} connection sent {what}" in str(raised.value)
        assert "rank 1 (" in str(raised.value)
    finally:
        rank.close()


@pytest.mark.parametrize(("per_host", "zero_copy"), [(None, True), (None, False), (1, True)])
def test_large_unexpected_messages_wait_in_their_sender(per_host: int | None, zero_copy: bool) -> None:
    """Forty megabytes fit, two hundred do not; all arrive once they are asked for."""
    count, numel = 20, 10 << 17  # 10 MiB each
    # Before the group: no rank waits while the kernel finds this memory, which took 15 s on a busy machine.
    messages = [np.full(numel, float(number)) for number in range(count)]

    def work(group: un.Group) -> int:
        if group.rank == 0:
            sends = [group.isend(message, 1) for message in messages]
            group.barrier()
            waiting = sum(not one.done() for one in sends)
            group.barrier()
            for one in sends:
                one.wait()
            return waiting
        x = np.zeros(1)
        with pytest.raises(un.Timeout, match="not done"):  # takes in what it can meanwhile
            (never := group.irecv(x, 1, 5)).wait(1.0)
        group.barrier()
        group.barrier()  # rank 0 has counted
        y = np.zeros(numel)
        for number in range(count):
            group.recv(y, 0)
            assert (y == number).all()
        group.send(np.zeros(1), 1, 5)
        never.wait()
        return 0

    waiting = ranks.threads(2, work, per_host=per_host, zero_copy=zero_copy)[0]
    assert waiting >= count // 3  # six are kept; the kernel may hold four more


@pytest.mark.parametrize(("per_host", "zero_copy"), [(None, True), (None, False), (1, True)])
def test_ranks_that_all_send_large_messages_first_do_not_deadlock(
    per_host: int | None, zero_copy: bool
) -> None:
    numel = 12 << 20  # 96 MiB: more than is kept unasked

    def work(group: un.Group) -> None:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        group.send(np.full(numel + group.rank, float(group.rank)), right)
        x = np.zeros(numel + left)
        group.recv(x, left)
        assert (x == left).all()

    ranks.threads(3, work, per_host=per_host, zero_copy=zero_copy)
