"""One rank on one of the test's hosts: `group_program.py WHAT`, started by test_groups.py."""

import os
import select
import sys
import time
from dataclasses import replace

import numpy as np

import operations
import unisono as un
from operations import Call

SECRET = b"the weights of a model, by the byte"
KINDS = [
    ("float32", un.SUM, (3, 11)),
    ("bfloat16", un.MAX, (1,)),
    ("int64", un.AVG, (0,)),
    ("complex64", un.PRODUCT, (257,)),
    ("float64", operations.PREMUL, (70_001,)),
]


def conformance(group: un.Group) -> None:
    """Every operation, one after the other; then with every dtype above, all in flight."""
    number = 0
    for dtype, op, shape in KINDS:
        kept = un.SUM if dtype == "int64" else op
        calls = [
            Call(kind, dtype, kept, shape, root=group.size - 1, form=form)
            for kind in operations.OPERATIONS
            for form in ("array", "list", "own")
        ]
        for call in calls if dtype == "float32" else ():
            operations.finish(operations.begin(group, call, number := number + 1))
        turns = []
        for call in calls:
            turns.append(operations.begin(group, replace(call, async_op=True), number := number + 1))
        for turn in turns:
            operations.finish(turn)
    operations.run(group, "all_reduce", 2_000_003)
    print("hosts", len({group.host_of(rank) for rank in range(group.size)}), flush=True)


def loop(group: un.Group) -> None:
    """Reduce until told otherwise: by the sum, 0 of every rank, or by an error."""
    x = np.ones(100_000, np.float32)
    said = False
    while True:
        x[:] = 1
        try:
            group.all_reduce(x)
        except un.UnisonoError as error:
            print("error", time.time(), type(error).__name__, str(error).replace("\n", " "), flush=True)
            return
        assert (x == group.size).all()
        if not said:
            said = True
            print("up", flush=True)
        print("at", time.time(), flush=True)
        time.sleep(0.01)


def exact(group: un.Group) -> None:
    """Bits that do not depend on the network."""
    for numel in (1, 1000, 200_003):
        x = (np.arange(numel) % 97 + group.rank).astype(np.float64)
        group.all_reduce(x)
        wanted = (np.arange(numel) % 97) * group.size + sum(range(group.size))
        assert (x == wanted).all()
        y = np.full(numel, group.rank)
        group.broadcast(y, 1)
        assert (y == 1).all()
    print("exact", flush=True)


def bytes_of_all_reduce(group: un.Group) -> None:
    """Reduce 64 MB in all, between two lines that the test counts by."""
    x = np.zeros(4 << 20, np.float32)
    group.all_reduce(x)
    group.barrier()
    print("begin", flush=True)
    sys.stdin.readline()
    for _ in range(4):
        group.all_reduce(x)
    group.barrier()
    print("end", flush=True)
    sys.stdin.readline()


def secret(group: un.Group) -> None:
    """Send what the test looks for on the wire."""
    x = np.frombuffer(SECRET * 4096, np.uint8).copy()
    group.broadcast(x, 0)
    assert x.tobytes() == SECRET * 4096
    if group.rank == 0:
        group.send(x, 1)
    elif group.rank == 1:
        group.recv(x, 0)
    print("told", flush=True)


def mill(group: un.Group) -> None:
    """Make groups, each with connections of its own, until the test says something to rank 0."""
    rounds, over = 0, np.zeros(1)
    while not over:
        with group.subgroup(range(group.size)) as made:
            x = np.full(1000, group.rank)
            made.all_reduce(x)
            assert (x == sum(range(group.size))).all()
        rounds += 1
        if rounds == 10:
            print("up", flush=True)
        if group.rank == 0:
            over[0] = bool(select.select([sys.stdin], [], [], 0)[0])
        group.broadcast(over, 0)
    print("rounds", rounds, flush=True)


def main() -> None:
    limit = float(os.environ.get("LIMIT_S", "600"))
    with un.init_process_group(init_method=os.environ.get("INIT_METHOD"), timeout=limit) as group:
        globals()[sys.argv[1]](group)


if __name__ == "__main__":
    main()
