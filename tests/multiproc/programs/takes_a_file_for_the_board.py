"""Children of a rank make a group. They inherit UNISONO_STATUS_FD, and another file has its number.

The file then becomes shorter. Rank 1 exits, and rank 0 prints what it is told.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import unisono as un

if len(sys.argv) == 1:
    with tempfile.TemporaryDirectory() as folder:
        children = [subprocess.Popen([sys.executable, __file__, folder, str(rank)]) for rank in range(2)]
        print(*(child.wait() for child in children))
    sys.exit()

folder, rank = sys.argv[1], int(sys.argv[2])
number = int(os.environ["UNISONO_STATUS_FD"].partition(":")[0])
records = Path(folder, f"records{rank}")
records.write_bytes(bytes(32))
with records.open("rb") as file:
    os.dup2(file.fileno(), number)
meeting = Path(folder, "meeting").as_uri()
group = un.init_process_group(init_method=meeting, rank=rank, world_size=2)
group.barrier()
os.truncate(records, 0)
if rank == 1:
    os._exit(7)
try:
    group.all_reduce(np.ones(1))
except un.PeerLost as error:
    print(type(error).__name__, error.rank, flush=True)
os._exit(0)
