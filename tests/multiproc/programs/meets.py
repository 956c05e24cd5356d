"""`meets.py HOW [METHOD [NAME]]`: one process comes to a rendezvous, and prints who came.

HOW: "closes" afterwards, "sleeps", "ends" without a close, or "says" first that it comes, and closes.
"""

import sys
import time

from unisono.engine.bootstrap.rendezvous import rendezvous
from unisono.engine.environment import env

how = sys.argv[1]
if how == "says":
    print("waiting", flush=True)
method = sys.argv[2] if len(sys.argv) > 2 else None
name = sys.argv[3] if len(sys.argv) > 3 else "world"
world = rendezvous(method, store=None, rank=-1, world_size=-1, timeout_s=30, settings=env.read(), name=name)
pids = [member.pid for member in world.members]
print(f"{world.rank} {world.world_size} {pids}\n", end="", flush=True)  # in one piece
if how != "ends":
    world.store.add("n", 1)
    if how == "sleeps":
        time.sleep(60)
    else:
        world.close()
