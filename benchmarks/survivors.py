"""How long it takes to find a lost rank, to shrink, and to admit a newcomer: median and worst, in ms.

    python benchmarks/survivors.py [--rounds 50] [--ranks 8]

Each round forks new ranks. `detect` is from SIGKILL to the error of each survivor, `shrink` one call on each
survivor, `renew` a call in which nobody is out, `admit` from the newcomer's call of join to its group, while
the members call admit all the time. "two hosts": half of the ranks count as on another host, with connections
over the loopback interface; tests/hosts/test_survivors_on_hosts.py has real ones.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

import unisono as un

RENEWALS = 5


def group_of(folder: str, rank: int, size: int) -> un.Group:
    """The group of this round."""
    group = un.init_process_group(
        init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=30
    )
    group.elastic = True
    for _ in range(3):
        group.all_reduce(np.ones(1000))
    return group


def survive(folder: str, rank: int, size: int) -> dict[str, float]:
    """A rank of the round in which one is killed."""
    group = group_of(folder, rank, size)
    group.barrier()
    if rank == size // 2:
        time.sleep(0.02)
        Path(folder, "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    found = {}
    try:
        while True:
            group.all_reduce(np.ones(1000))
    except un.PeerLost:
        seen = time.monotonic()
    following = group.shrink()
    found["shrink"] = time.monotonic() - seen
    following.all_reduce(np.ones(10))
    found["detect"] = seen - float(Path(folder, "killed").read_text())
    for number in range(RENEWALS):
        following.barrier()
        began = time.monotonic()
        following = following.shrink()
        found[f"renew {number}"] = time.monotonic() - began
    following.barrier()
    following.close()
    return found


def grow(folder: str, rank: int, size: int) -> dict[str, float]:
    """A rank of the round in which the last one comes later."""
    place = Path(folder, "address")
    if rank == size - 1:
        while not place.exists():
            time.sleep(0.01)
        time.sleep(0.05)
        began = time.monotonic()
        group = un.join(place.read_text(), timeout=30)
        took = time.monotonic() - began
        group.barrier()
        group.close()
        return {"admit": took}
    group = group_of(folder, rank, size - 1)
    addresses = group.listen()
    if rank == 0:
        place.with_suffix(".new").write_text(addresses[0])
        place.with_suffix(".new").rename(place)
    while group.size < size:
        group = group.admit()
        time.sleep(0.0005)
    group.barrier()
    group.close()
    return {}


def round_of(work: Callable[[str, int, int], dict[str, float]], size: int) -> dict[str, list[float]]:
    """One round: forks the ranks, and collects what they have measured."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                try:
                    Path(folder, f"result{rank}").write_text(json.dumps(work(folder, rank, size)))
                except BaseException:  # noqa: BLE001 (the parent goes on)
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        for path in Path(folder).glob("result*"):
            for name, value in json.loads(path.read_text()).items():
                found.setdefault(name.split()[0], []).append(1000 * value)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=8)
    chosen = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}, {chosen.ranks} ranks, {chosen.rounds} rounds; ms")
    print(f"{'':24} {'median':>8} {'p99':>8} {'worst':>8} {'of':>6}")
    for where, per_host in (("one host", 0), ("two hosts", chosen.ranks // 2)):
        os.environ["UNISONO_RANKS_PER_HOST"] = str(per_host)
        found: dict[str, list[float]] = {}
        for _ in range(chosen.rounds):
            for work in (survive, grow):
                for name, values in round_of(work, chosen.ranks).items():
                    found.setdefault(name, []).extend(values)
        for name in ("detect", "shrink", "renew", "admit"):
            values = sorted(found.get(name, []))
            if values:
                median, p99 = statistics.median(values), values[int(0.99 * (len(values) - 1))]
                print(
                    f"{where + ', ' + name:24} {median:8.1f} {p99:8.1f} {values[-1]:8.1f} {len(values):6}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
