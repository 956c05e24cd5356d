"""`comes_from_a_host.py HOW`: a rank meets the others; "tells" its place, "fails" (rank 2), or "sleeps"."""

import os
import sys
import time

from unisono.engine.bootstrap.rendezvous import rendezvous
from unisono.engine.environment import env

how = sys.argv[1]
rank = int(os.environ["RANK"])
meeting = rendezvous(None, store=None, rank=-1, world_size=-1, timeout_s=300, settings=env.read())
if how == "tells":
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    print("place", *(os.environ[name] for name in names), meeting.members[rank].host, flush=True)
    meeting.close()
elif how == "fails" and rank == 2:
    raise ValueError("label 10 is out of range")
else:
    print("up", flush=True)
    time.sleep(3600)
