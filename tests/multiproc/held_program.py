"""A reader is held in the middle of a message that it reads where its sender has it; what becomes of both.

    python held_program.py COLLECTIVE ENDING

What it reads into is a file that ends in the middle. Writing beyond is a SIGBUS, and Python's handler comes
back to the same write, again and again, until the file is made longer. By then, with the ending "abort", the
sender has given up and put something else there; with "kill" the reader does not come back.
Prints how the call ended for the sender, and for the reader.
"""

import contextlib
import gc
import mmap
import os
import signal
import sys
import threading
from typing import Any

import numpy as np

import unisono as un
from unisono import _native
from unisono.engine.group import Group
from unisono.engine.group.native import NativeGroup
from unisono.engine.store import HashStore

NUMEL = 32 * 1024
BYTES = 4 * NUMEL
SEGMENT_BYTES = 1 << 20


def open_group(region: Any, rank: int, peer: int) -> Group:
    liveness = [-1, -1]
    liveness[1 - rank] = os.pidfd_open(peer)
    engine = _native.Engine(region, rank, liveness, -1, 2, -1, SEGMENT_BYTES)
    return NativeGroup(engine, rank, 2, "held", 60.0, HashStore(60.0))


def call(group: Group, collective: str, out: Any, x: Any, **options: Any) -> Any:
    """out: one block.  x: two."""
    if collective == "reduce_scatter":
        return group.reduce_scatter(out, x, **options)
    blocks = [np.empty_like(out), np.empty_like(out)]
    blocks[1 - group.rank] = out
    return group.all_gather(blocks, x[:NUMEL], **options)


def ending_of(group: Group, collective: str, x: Any, out: Any = None) -> str:
    try:
        call(group, collective, np.empty(NUMEL, np.float32) if out is None else out, x)
    except un.GroupError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "returned"


def read(region: Any, collective: str, memory: int, held: int) -> str:
    """Rank 1: what it has read, and how the call ended."""
    out = np.frombuffer(mmap.mmap(memory, BYTES), np.float32)
    os.ftruncate(memory, BYTES // 2)
    signal.signal(signal.SIGBUS, lambda *_: None)
    signal.set_wakeup_fd(held, warn_on_full_buffer=False)
    group = open_group(region, 1, os.getppid())
    how = ending_of(group, collective, np.ones(2 * NUMEL, np.float32), out)
    return f"{sorted(set(out.tolist()))} {how}"


def send(region: Any, collective: str, memory: int, held: int, reader: int, ending: str) -> str:
    """Rank 0: how the call ended."""
    group = open_group(region, 0, reader)
    x = un.empty(2 * NUMEL, np.float32)
    x[:] = 1
    ended: list[str] = []

    def in_thread(x: Any) -> None:
        ended.append(ending_of(group, collective, x))

    sender = threading.Thread(target=in_thread, args=(x,))
    sender.start()
    told = os.read(held, 1)
    assert told == bytes([signal.SIGBUS])
    os.kill(reader, signal.SIGKILL if ending == "kill" else signal.SIGSTOP)
    if ending == "abort":
        group.abort()
    sender.join()
    assert (x == 1).all()
    del sender, x
    gc.collect()
    again = un.empty(2 * NUMEL, np.float32)
    again[:] = 7
    os.ftruncate(memory, BYTES)
    if ending == "abort":
        os.kill(reader, signal.SIGCONT)
        os.waitpid(reader, 0)
    group.close()
    return ended[0]


def main(collective: str, ending: str) -> None:
    region = _native.Region(-1, 2, 1 << 20, True)
    region.enable_zero_copy()
    memory = os.memfd_create("out")
    os.ftruncate(memory, BYTES)
    held, holds = os.pipe()
    os.set_blocking(holds, False)
    reader = os.fork()
    if reader == 0:
        print("reader:", read(region, collective, memory, holds), flush=True)
        os._exit(0)
    os.close(holds)
    try:
        print("sender:", send(region, collective, memory, held, reader, ending))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(reader, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
