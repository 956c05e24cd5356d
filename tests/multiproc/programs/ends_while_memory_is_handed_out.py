"""`ends_while_memory_is_handed_out.py RANK MOMENT`: that one ends while a group is made.

The others print what they are told.
MOMENT: "before" the shared memory, or "behind" it: with its descriptor.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import unisono as un
from unisono.engine.bootstrap import engine, shared_memory

real = shared_memory.socket.recv_fds


def receive_and_end(*given: Any) -> None:
    real(*given)
    os._exit(0)


if os.environ["RANK"] == sys.argv[1]:
    if sys.argv[2] == "before":
        engine.share_memory = lambda *_, **__: os._exit(0)
    else:
        shared_memory.socket.recv_fds = receive_and_end
LIMIT_S = 600.0
started = time.monotonic()
try:
    un.init_process_group(init_method=os.environ["MEETING"], timeout=LIMIT_S)
except un.RendezvousError as error:
    print("late" if time.monotonic() - started > LIMIT_S / 2 else "at once", error)
    told = os.environ["MEETING"].removeprefix("file://") + ".told"
    Path(told + os.environ["RANK"]).touch()
    while sum(os.path.exists(f"{told}{rank}") for rank in range(3)) < 2:
        time.sleep(0.01)  # or the other one may see this rank end first
