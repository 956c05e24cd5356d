"""Rank 0 sends more than the connections hold, and ends; rank 1 receives it when FILE is there.

sends_and_ends.py FILE
"""

import sys
import time
from pathlib import Path

import numpy as np

import unisono as un

PIECE, STANDS_S = 1 << 16, 1.0
go = Path(sys.argv[1])
full, ends = go.with_suffix(".full"), go.with_suffix(".ends")


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def ends_in_time(request: un.Work) -> bool:
    until = time.monotonic() + STANDS_S
    while not request.done() and time.monotonic() < until:
        time.sleep(0.001)
    return request.done()


group = un.init_process_group()
piece = np.zeros(PIECE, np.uint8)
if group.rank == 0:
    pieces = 1
    while ends_in_time(request := group.isend(piece, 1)):
        pieces += 1
    full.touch()
    request.wait()
    ends.write_text(str(pieces))
else:
    wait_for(full)
    received = 0
    while not ends.exists():  # makes place for the last piece, and for little more
        group.recv(piece, 0)
        received += 1
        time.sleep(0.02)
    wait_for(go)
    for _ in range(int(ends.read_text()) - received):
        group.recv(piece, 0)
    print("received all")
