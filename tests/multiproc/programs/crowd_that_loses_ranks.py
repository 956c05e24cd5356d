"""`crowd_that_loses_ranks.py SIZE VICTIM...`: forks SIZE ranks, kills some, and prints what the others have.

A line for each survivor: its new rank, the size of the next group, who has left, whether results are right.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

import numpy as np

import unisono as un

size, victims = int(sys.argv[1]), [int(each) for each in sys.argv[2:]]


def right(group: un.Group) -> bool:
    """Whether collectives and messages of this group give the known results."""
    ranks = np.arange(group.size)
    x = np.full(5000, float(group.rank))
    group.all_reduce(x)
    got = np.empty(1)
    group.sendrecv(np.full(1, float(group.rank)), (group.rank + 1) % group.size, got)
    everybody = group.all_gather(np.full(1, float(group.rank))).ravel()
    sums = bool((x == ranks.sum()).all()) and group.all_reduce(1) == group.size
    return sums and got[0] == (group.rank - 1) % group.size and bool((everybody == ranks).all())


def live(rank: int, meeting: str) -> str:
    """One rank's life; returns its line."""
    with un.init_process_group(init_method=meeting, rank=rank, world_size=size, timeout=60) as group:
        group.elastic = True
        before = right(group)
        group.barrier()
        if rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                group.barrier()
        except un.PeerLost:
            following = group.shrink()
        left = sorted(one.rank for one in following.left)
        with following:
            return f"{following.rank} {following.size} {left} {before and right(following)}"


def main(meeting: str) -> None:
    """Fork all ranks, and wait for them."""
    _ = un.init_process_group  # loaded before the forks
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                os.write(1, (live(rank, meeting) + "\n").encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    folder = Path(os.environ["FOLDER"])
    main(f"file://{folder}/meeting")
