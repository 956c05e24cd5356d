"""Rank 1 is killed between two barriers."""

import os
import signal

import unisono as un
from launched import rank

group = un.init_process_group()
group.barrier()  # else rank 1 may be gone while the others still make the group
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
group.barrier()
