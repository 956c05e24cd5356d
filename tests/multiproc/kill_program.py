"""Kill a random rank at a random moment, many times; what every survivor said, and how soon. Others may just
then read its memory.

    python kill_program.py ROUNDS RANKS SEED

Ranks are forked, so that a round takes milliseconds; this process does what the launcher does: it keeps
the status board. Prints one line a round that went wrong, then a summary as JSON.
"""

import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
from typing import Any

import numpy as np

import unisono as un
from effort import HANG_S, LONG
from unisono.engine.bootstrap.engine import EngineSettings, open_engine
from unisono.engine.group.native import NativeGroup
from unisono.engine.store import FileStore

RECORD = struct.Struct("<iiii")
WORD = struct.Struct("<i")
RUNNING, SIGNALLED = 1, 3
# Where others want the cores a survivor may get no turn for a while: only the long tests judge by the clock.
LATE_S, MEDIAN_S = (5.0, 1.0) if LONG else (HANG_S, HANG_S)
SIZES = [1, 100, 20_000, 3_000_000]


def survive(path: str, rank: int, size: int, board: int, ready: int, report: int) -> None:
    """A rank: says that it is ready, reduces until somebody dies, then reports what it was told."""
    store = FileStore(path, size)
    settings = EngineSettings(1 << 20, -1.0, board, int(os.environ.get("UNISONO_RANKS_PER_HOST", "0")))
    opened = open_engine(store, rank, size, timeout_s=HANG_S, settings=settings)
    group = NativeGroup(opened.engine, rank, size, "world", HANG_S, hosts=opened.hosts)
    os.write(ready, b".")
    try:
        while True:
            for numel in SIZES:
                x, got = np.ones(numel, np.float32), np.empty(numel, np.float32)
                group.all_reduce(x)
                group.broadcast(x, src=size - 1)
                group.sendrecv(x, (rank + 1) % size, got, (rank - 1) % size)
                block = numel // size
                blocks = [each[: block * size].reshape(size, block) for each in (got, x)]
                group.all_to_all(*blocks)
    except un.PeerLost as error:
        told = {"rank": error.rank, "pid": error.pid, "signal": error.signal, "text": str(error)}
    except un.GroupError as error:
        told = {"text": f"{type(error).__name__}: {error}"}
    told["at"] = time.monotonic()
    os.write(report, (json.dumps(told) + "\n").encode())
    group.close()
    os._exit(0)


def one_round(size: int, folder: str, number: int, rng: random.Random) -> list[str]:
    """One kill; what went wrong."""
    board = os.memfd_create("board")
    os.ftruncate(board, RECORD.size * size)
    with mmap.mmap(board, RECORD.size * size) as records:
        reader, writer = os.pipe()
        all_ready, ready = os.pipe()
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                survive(f"{folder}/{number}", rank, size, board, ready, writer)
            RECORD.pack_into(records, rank * RECORD.size, pid, RUNNING, 0, 0)
            pids.append(pid)
        os.close(writer)
        os.close(ready)
        for _ in range(size):
            os.read(all_ready, 1)
        os.close(all_ready)
        time.sleep(rng.uniform(0.0, 0.3))
        victim = rng.randrange(size)
        killed_at = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        os.waitpid(pids[victim], 0)
        # As the launcher does: how it ended first, then that it ended.
        WORD.pack_into(records, victim * RECORD.size + 2 * WORD.size, signal.SIGKILL)
        WORD.pack_into(records, victim * RECORD.size + WORD.size, SIGNALLED)
        wrong = reap(pids, victim)
        with os.fdopen(reader) as lines:
            told = [json.loads(line) for line in lines]
    os.close(board)
    if len(told) != size - 1:
        wrong.append(f"{len(told)} survivors of {size - 1} reported")
    for one in told:
        wrong += judge(one, victim, pids[victim], killed_at)
    return wrong


def reap(pids: list[int], victim: int) -> list[str]:
    deadline = time.monotonic() + HANG_S
    wrong = []
    for rank, pid in enumerate(pids):
        if rank == victim:
            continue
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                wrong.append(f"rank {rank} hangs")
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.002)
    return wrong


LATENCIES: list[float] = []


def judge(told: dict[str, Any], victim: int, pid: int, killed_at: float) -> list[str]:
    elapsed = told["at"] - killed_at
    LATENCIES.append(elapsed)
    wrong = []
    if (told.get("rank"), told.get("pid")) != (victim, pid):
        wrong.append(f"names another rank: {told['text']}")
    # Nobody sees how a process ended on a host where it was alone.
    seen = os.environ.get("UNISONO_RANKS_PER_HOST") != "1"
    if seen and (told.get("signal") != signal.SIGKILL or "SIGKILL" not in told["text"]):
        wrong.append(f"does not name the signal: {told['text']}")
    if elapsed > LATE_S:
        wrong.append(f"took {elapsed:.2f} s")
    return wrong


def main() -> None:
    rounds, size, seed = (int(word) for word in sys.argv[1:4])
    rng = random.Random(seed)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            wrong = one_round(size, folder, number, rng)
            failed += bool(wrong)
            for line in wrong:
                print(f"round {number}: {line}")
    LATENCIES.sort()
    failed += LATENCIES[len(LATENCIES) // 2] > MEDIAN_S
    print(
        json.dumps(
            {
                "rounds": rounds,
                "ranks": size,
                "failed": failed,
                "open_descriptors": len(os.listdir("/proc/self/fd")),
                "p50_ms": round(1e3 * LATENCIES[len(LATENCIES) // 2], 1),
                "p99_ms": round(1e3 * LATENCIES[int(len(LATENCIES) * 0.99)], 1),
                "max_ms": round(1e3 * LATENCIES[-1], 1),
            }
        )
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
