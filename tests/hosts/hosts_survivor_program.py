"""A rank of a group on two hosts that loses ranks, or its other host. Prints "ready", then a JSON line."""

import json
import os
import time
from typing import Any

import numpy as np

import unisono as un


def report(**facts: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **facts}), flush=True)


def check(group: un.Group) -> None:
    x = np.full(20_000, float(group.rank))
    group.all_reduce(x)
    assert (x == sum(range(group.size))).all(), "a wrong sum"
    got = np.empty(10)
    group.sendrecv(np.full(10, float(group.rank)), (group.rank + 1) % group.size, got)
    assert (got == (group.rank - 1) % group.size).all(), "a wrong message"


def main() -> None:
    group = un.init_process_group(timeout=300)
    group.elastic = True
    for _ in range(3):
        check(group)
    print("ready", flush=True)
    try:
        while True:
            check(group)
    except un.Evicted as error:
        report(evicted=error.why)
        return
    except (un.PeerLost, un.Timeout) as error:
        found = time.monotonic()
        report(found=found, fault=str(error))
    try:
        following = group.shrink()
    except un.Evicted as error:
        report(evicted=error.why)
        return
    report(shrink_ms=1000 * (time.monotonic() - found))
    for _ in range(3):
        check(following)
    left = {one.rank: one.why for one in following.left}
    report(size=following.size, new_rank=following.rank, generation=following.generation, left=left)
    following.close()


if __name__ == "__main__":
    assert "RANK" in os.environ
    main()
