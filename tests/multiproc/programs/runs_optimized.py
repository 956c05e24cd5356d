"""Collectives and messages against NumPy; no check is an assert, which `python -O` drops."""

import os
from typing import Any

import numpy as np

import unisono as un
from unisono.plans import ALGORITHMS


def same(found: Any, expected: Any, what: str) -> None:
    if not np.array_equal(found, expected):
        raise SystemExit(f"{what}: {found}, expected {expected}")


def collectives(group: un.Group, numel: int) -> None:
    size, rank = group.size, group.rank
    for algorithm in ALGORITHMS["all_reduce"]:
        x = np.full(numel, rank + 1.0)
        group.all_reduce(x, algorithm=algorithm)
        same(x, np.full(numel, size * (size + 1) / 2), algorithm)
    blocks = np.stack([np.full(numel, float(each)) for each in range(size)])
    same(group.all_gather(blocks[rank]), blocks, "all_gather")
    same(group.reduce_scatter(blocks), size * blocks[rank], "reduce_scatter")
    same(group.all_to_all(np.stack([blocks[rank]] * size)), blocks, "all_to_all")
    x = blocks[rank].copy()
    group.broadcast(x, size - 1)
    same(x, blocks[-1], "broadcast")
    group.barrier()


def messages(group: un.Group) -> None:
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    got = np.zeros(1 << 17)
    work = group.isend(np.full(1 << 17, float(group.rank)), right)
    group.recv(got, left)
    work.wait()
    same(got, np.full(1 << 17, float(left)), "recv")
    same(group.all_gather_object(group.rank), range(group.size), "all_gather_object")


def main() -> None:
    if __debug__:
        raise SystemExit("Python runs without -O")
    with un.init_process_group(init_method=os.environ["MEETING"], timeout=60) as group:
        for numel in (1, 1000, 200_000):
            collectives(group, numel)
        messages(group)
        pair = group.subgroup([0, group.size - 1])
        if pair is not None:
            collectives(pair, 100)
            pair.close()
    print("all right")


if __name__ == "__main__":
    main()
