"""One rank of a job that another launcher started: `python rank_program.py [CASE]`. Unisono's own API.

sum    add up the ranks, say so, end
dies   rank 1 kills itself with SIGKILL; the others are in a collective then
fails  rank 1 raises a ValueError
long   add up until somebody ends it
"""

import os
import signal
import sys
import time

import numpy as np

import unisono as un


def main(case: str) -> None:
    with un.init_process_group(timeout=60) as world:
        x = np.full((3, 4), world.rank + 1.0)
        world.all_reduce(x)
        host = os.uname().nodename
        sys.stdout.write(f"rank {world.rank} of {world.size} on {host}: {x[2, 3]:g}\n")
        sys.stdout.flush()
        if case == "dies" and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "fails" and world.rank == 1:
            raise ValueError("label 10 is out of range")
        if case in ("dies", "fails"):
            world.all_reduce(x)
        while case == "long":
            world.barrier()
            time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "sum")
