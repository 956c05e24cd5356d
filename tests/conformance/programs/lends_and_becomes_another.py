"""Rank 1 sends with zero copy, and becomes another program with other memory at that address; rank 0
receives.

lends_and_becomes_another.py                       the two ranks
lends_and_becomes_another.py READY OVER            what rank 1 becomes: it makes READY, and waits for OVER
"""

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

AT, NBYTES = 0x7E90_0000_0000, 1 << 20


def map_memory() -> Any:
    """A megabyte at an address of our own choice."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    if libc.mmap(AT, NBYTES, 3, 0x100022, -1, 0) != AT:  # fixed, private, anonymous
        raise OSError("no memory at that address")
    return (ctypes.c_ubyte * NBYTES).from_address(AT)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def be_another(ready: Path, over: Path) -> None:
    map_memory()
    ctypes.memset(AT, 2, NBYTES)
    ready.touch()
    wait_for(over)
    print("fine")


def send(ready: Path, over: Path) -> None:
    import numpy as np

    import unisono as un

    group = un.init_process_group(init_method=os.environ["MEETING"], timeout=60)
    memory = map_memory()
    if group.rank == 1:
        ctypes.memset(AT, 1, NBYTES)
        _work = group.isend(np.frombuffer(memory, np.uint8), 0)
        os.execv(sys.executable, [sys.executable, __file__, str(ready), str(over)])
    wait_for(ready)
    try:
        got = np.zeros(NBYTES, np.uint8)
        group.recv(got, 1, timeout=1)
        raise SystemExit(f"received what was never sent: {np.unique(got)}")
    except un.PeerLost:
        print("fine")
    finally:
        over.touch()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_another(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        folder = os.environ["MEETING"].removeprefix("file://")
        send(Path(folder + ".ready"), Path(folder + ".over"))
