"""How long it takes to find a lost rank, to shrink, and to admit a newcomer: median and worst, in ms.

    python benchmarks/survivors.py [--rounds 50] [--ranks 8]
    python benchmarks/survivors.py --once --ranks 64 256 1000

Each round forks new ranks. `detect` is from SIGKILL to the error of each survivor, `shrink` one call on each
survivor, `renew` a call in which nobody is out, `admit` from the newcomer's call of join to its group, while
the members call admit all the time. `start` is what the newcomer takes before that, to load Unisono: a part
of its own start. "two hosts": half of the ranks count as on another host, with connections
over the loopback interface; tests/hosts/test_survivors_on_hosts.py has real ones.

--once: one life of each number of ranks on this machine, see one_life.py. Of each phase the seconds up to the
last rank, the CPU time of a rank, and its memory at the end (PSS).
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
from one_life import live

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
        join = un.join
        started = time.monotonic()
        group = join(place.read_text(), timeout=30)
        took = time.monotonic() - started
        group.barrier()
        group.close()
        return {"start": started - began, "admit": took}
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


def once(ranks: int) -> None:
    """Print the table of one life."""
    print(f"{ranks} ranks {'seconds':>12} {'CPU ms of a rank':>20} {'MiB of a rank':>15}", flush=True)
    for phase, seconds, cpu_s, memory in live(ranks):
        shown = f"{memory:15.1f}" if memory else ""
        print(f"{phase:12} {seconds:10.2f} {1000 * cpu_s / ranks:20.1f} {shown}", flush=True)


def rounds_of(ranks: int, rounds: int) -> None:
    """Print the table of many short lives."""
    print(f"{f'{ranks} ranks, ms':24} {'median':>8} {'p99':>8} {'worst':>8} {'of':>6}")
    for where, per_host in (("one host", 0), ("two hosts", ranks // 2)):
        os.environ["UNISONO_RANKS_PER_HOST"] = str(per_host)
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for work in (survive, grow):
                for name, values in round_of(work, ranks).items():
                    found.setdefault(name, []).extend(values)
        for name in ("detect", "shrink", "renew", "start", "admit"):
            values = sorted(found.get(name, []))
            if values:
                median, p99 = statistics.median(values), values[int(0.99 * (len(values) - 1))]
                print(
                    f"{where + ', ' + name:24} {median:8.1f} {p99:8.1f} {values[-1]:8.1f} {len(values):6}",
                    flush=True,
                )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--once", action="store_true")
    chosen = parser.parse_args()
    if min(chosen.ranks) < 3:
        parser.error("--ranks: at least 3, of which one is lost")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for ranks in chosen.ranks:
        if chosen.once:
            once(ranks)
        else:
            rounds_of(ranks, chosen.rounds)


if __name__ == "__main__":
    main()
