"""Memory that groups take: 64 groups of 4 ranks on one host, each of which has reduced 16 MiB.

    unisono run -n 4 benchmarks/memory.py [--groups 64]

Counted is the proportional share (Pss) of every process, before the groups are made and after: shared
memory counts once. What a group takes is mostly its staging: UNISONO_STAGING_BYTES per rank, 1 MiB by
default.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

import unisono as un


def held() -> int:
    """The memory of this process in bytes; shared memory is divided by the number of its users (PSS)."""
    with open("/proc/self/smaps_rollup") as table:
        line = next(line for line in table if line.startswith("Pss:"))
    return int(line.split()[1]) << 10


def main() -> None:
    """Make the groups and let rank 0 print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--nbytes", type=int, default=16 << 20, help="bytes that each group reduces once")
    args = parser.parse_args()
    with un.init_process_group() as world:
        x = np.ones(args.nbytes // 4, np.float32)
        world.all_reduce(x)
        before = held()
        groups = [world.subgroup(range(world.size)) for _ in range(args.groups)]
        for group in groups:
            x.fill(1.0)
            group.all_reduce(x)
            assert x[0] == x[-1] == world.size
        world.barrier()  # all ranks have made all groups
        grown = np.array([held() - before], np.int64)
        world.all_reduce(grown)
        if world.rank == 0:
            record = {"groups": args.groups, "ranks": world.size, "bytes": int(grown[0])}
            print(json.dumps(record), flush=True)
        for group in groups:
            group.close()


if __name__ == "__main__":
    main()
