"""One rank of the checks in cases.py, as a process. Started by test_collectives.py."""

import os
import sys

import numpy as np

import cases
import operations
import oracle
import unisono as un
from unisono.plans import ALGORITHMS


def main(arrays: str) -> None:
    with un.init_process_group(init_method=os.environ["MEETING"]) as group:
        shared = {"plain": 0, "shared": group.size, "mixed": group.size // 2}[arrays]
        with operations.arrays_from(un.empty if group.rank < shared else np.empty):
            check(group)
        group.barrier()
        print("all right", group.rank)


def check(group: un.Group) -> None:
    for dtype, op in oracle.pairs():
        for numel in cases.FEW:
            cases.all_reduce(group, dtype, op, "two_shot", numel)
    for algorithm in ALGORITHMS["all_reduce"]:
        for numel in cases.sizes(4, group.size):
            cases.all_reduce(group, "float32", un.SUM, algorithm, numel)
    for dtype in ("float32", "bfloat16", "int64"):
        for numel in (0, 1, 1000, 70_000):
            cases.moves(group, dtype, numel)
            cases.reduce(group, dtype, un.SUM, "direct", numel)
            cases.reduce_scatter(group, dtype, un.SUM, "direct", numel, in_place=False)
    cases.uneven(group)
    cases.in_flight(group)


if __name__ == "__main__":
    main(sys.argv[1])
