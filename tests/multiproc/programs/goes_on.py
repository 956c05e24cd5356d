"""An elastic program that checks sums. Arguments: steps, what happens, to which RANK ("1,3"), at which step.

What happens: kill, stop, raise, nothing; "vain": it is killed, and the replacements fail at once.
A process that joins a running group does not do it again. With STOP=FILE in the environment the program ends,
on all ranks, when that file exists.
"""

import os
import signal
import sys
import time

import numpy as np

import unisono as un

STEPS, WHAT, WHOM, AT = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), int(sys.argv[4])
NEW = "UNISONO_JOIN" in os.environ
MINE = os.environ["RANK"] in WHOM and not NEW
PAUSE_S = float(os.environ.get("PAUSE_S", "0.01"))
STOP = os.environ.get("STOP", "")


def strike() -> None:
    """What happens to this rank."""
    if WHAT in ("kill", "vain"):
        os.kill(os.getpid(), signal.SIGKILL)
    if WHAT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if WHAT == "raise":
        raise ValueError("bad loss")


if NEW and WHAT == "vain":
    sys.exit(3)
step = 0
for group in un.elastic():
    with group:
        step = int(group.all_reduce(step, un.MAX))
        print(f"generation {group.generation} size {group.size} step {step}", flush=True)
        while step < STEPS:
            if MINE and step == AT:
                strike()
            x = np.full(1000, float(group.rank + step))
            group.all_reduce(x)
            assert (x == sum(range(group.size)) + step * group.size).all(), "a wrong sum"
            step += 1
            time.sleep(PAUSE_S)
            if STOP and group.all_reduce(float(os.path.exists(STOP)), un.MAX):
                step = STEPS
            if step % 5 == 0 and group.waiting():
                break
print(f"done {step} size {group.size}", flush=True)
