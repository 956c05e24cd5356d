"""Of four ranks three end, each in its way; rank 0 prints the status board, and cannot write there."""

import os
import signal

from launched import board, board_fd, rank, until

until(lambda: all(pid for pid, _, _ in board()))
assert board()[rank][0] == os.getpid()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 2:
    os._exit(9)
if rank == 3:
    os._exit(0)
until(lambda: all(state > 1 for _, state, _ in board()[1:]))
print(*(f"{state}:{code}" for _, state, code in board()))
try:
    os.pwrite(board_fd, b"x", 0)
except OSError:
    print("read-only")
