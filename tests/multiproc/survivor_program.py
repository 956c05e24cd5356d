"""A rank of a group that loses ranks. The JSON line that it prints says what became of it.

Arguments: what happens (a name below; "outside": another process does it when all have said that they are
ready), the ranks that it happens to ("1,3"), a seed for the moment.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

import unisono as un

WHAT, WHOM = sys.argv[1], [int(each) for each in sys.argv[2].split(",") if each]
SEED, TIMEOUT_S = int(sys.argv[3]), {"outside": 300}
SIZES = (1, 100, 5000, 300_000)


def report(**facts: Any) -> None:
    print(json.dumps({"rank": int(os.environ["RANK"]), **facts}), flush=True)


def strike(number: int, after_s: float) -> None:
    """Send this process a signal, from a thread."""
    threading.Timer(after_s, os.kill, (os.getpid(), number)).start()


def check(group: un.Group, step: int) -> None:
    """A collective and a message, with results that are known."""
    x = np.full(SIZES[step % len(SIZES)], float(group.rank + step))
    group.all_reduce(x)
    assert (x == sum(rank + step for rank in range(group.size))).all(), "a wrong sum"
    got = np.empty(10)
    group.sendrecv(np.full(10, float(group.rank)), (group.rank + 1) % group.size, got)
    assert (got == (group.rank - 1) % group.size).all(), "a wrong message"


def work(group: un.Group) -> None:
    """Until a rank is lost."""
    mine = group.rank in WHOM
    after_s = random.Random(SEED + group.rank).random() * 0.05
    if mine and WHAT in ("kill", "stop"):
        strike(signal.SIGKILL if WHAT == "kill" else signal.SIGSTOP, after_s)
    for step in range(1_000_000):
        if mine and step == 20 and WHAT == "raise":
            raise ValueError("bad loss")
        if mine and step == 20 and WHAT == "slow":
            time.sleep(7)
        check(group, step)


def follow(group: un.Group) -> tuple[un.Group, dict[int, str], list[int]]:
    """The group of all that stay; who has left and why, and its ranks, by the numbers of the first group.

    Ranks that are struck are lost at moments of their own: a group may be made that still has one of them.
    """
    began = time.monotonic()
    if WHAT == "during" and group.rank in WHOM:
        strike(signal.SIGKILL, random.Random(SEED + group.rank).random() * 0.02)
        time.sleep(0.002)
    left: dict[int, str] = {}
    ranks = list(range(group.size))
    following = group.shrink(exclude=WHOM if WHAT == "exclude" else ())
    while True:
        left.update({ranks[one.rank]: one.why for one in following.left})
        ranks = [ranks[former] for former in following.previous_ranks if former is not None]
        if WHAT not in ("during", "kill", "stop") or following.size <= group.size - len(WHOM):
            report(shrink_ms=1000 * (time.monotonic() - began))
            return following, left, ranks
        try:
            while True:
                check(following, 1)
        except (un.PeerLost, un.Timeout):
            following = following.shrink()


def main() -> None:
    group = un.init_process_group(init_method=os.environ["MEETING"], timeout=TIMEOUT_S.get(WHAT, 20))
    group.elastic = WHAT in ("stop", "outside")
    group.timeout_s = 2.0 if WHAT == "slow" else group.timeout_s
    try:
        for step in range(4):  # a rank that dies early may end these, too
            check(group, step)
        if WHAT == "outside":
            print("ready", flush=True)
        if WHAT not in ("exclude", "during"):
            work(group)
    except un.Evicted as error:
        report(evicted=error.why, text=str(error))
        return
    except (un.PeerLost, un.Timeout) as error:
        report(fault=type(error).__name__)
    try:
        following, left, ranks = follow(group)
    except un.Evicted as error:
        report(evicted=error.why, text=str(error))
        return
    for step in range(8):
        check(following, step)
    report(
        size=following.size,
        new_rank=following.rank,
        generation=following.generation,
        left=left,
        previous=ranks,
    )
    following.close()


if __name__ == "__main__":
    main()
