"""Lowercase collectives against plain Python, with pickles on both sides of what a packet has room for.

MPI_OF=mpi4py mpiexec -n 3 python lowercase_collectives.py runs them with mpi4py, but for what that lacks.
"""

import importlib
import itertools
import operator
import os
import pickle
from collections import OrderedDict

import numpy as np

OURS = "MPI_OF" not in os.environ
MPI = importlib.import_module("unisono.mpi" if OURS else f"{os.environ['MPI_OF']}.MPI")
world = MPI.COMM_WORLD
LIMIT = 248


class Mine(dict):
    """A subclass, with an attribute."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Mine and dict(self) == dict(other) and vars(self) == vars(other)

    __hash__ = None


def of_length(length: int) -> bytes:
    """Bytes whose pickle has so many bytes."""
    for short in range(9, 30):
        made = bytes(max(0, length - short))
        if len(pickle.dumps(made, pickle.HIGHEST_PROTOCOL)) == length:
            return made
    return bytes(length)


def special(rank: int) -> Mine:
    made = Mine(x=rank)
    made.of = rank
    return made


OBJECTS = [
    lambda rank: None,
    lambda rank: rank,
    lambda rank: special(rank),
    lambda rank: OrderedDict(a=rank),
    *[lambda rank, n=n: [rank, of_length(LIMIT + n - 8)] for n in range(-6, 7)],
    lambda rank: of_length(LIMIT - 1 + rank),
    lambda rank: "x" * (10_000 * (rank == 0)),
    lambda rank: b"y" * (3_000_000 * (rank == world.size - 1)),
]


def check(comm: MPI.Intracomm, make: object, root: int) -> None:
    rank, size = comm.rank, comm.size
    everybody = [make(one) for one in range(size)]
    mine, at_root = everybody[rank], rank == root
    assert comm.bcast(mine if at_root else "not used", root) == everybody[root]
    assert comm.gather(mine, root) == (everybody if at_root else None)
    assert comm.scatter(everybody if at_root else None, root) == mine
    assert comm.allgather(mine) == everybody
    assert comm.alltoall([(mine, to) for to in range(size)]) == [(one, rank) for one in everybody]
    parts = [[one] for one in everybody]
    prefixes = list(itertools.accumulate(parts, operator.add))
    for op in (MPI.SUM, operator.add):
        assert comm.reduce(parts[rank], op, root) == (prefixes[-1] if at_root else None)
        assert comm.allreduce(parts[rank], op) == prefixes[-1]
        assert comm.scan(parts[rank], op) == prefixes[rank]
        assert comm.exscan(parts[rank], op) == (prefixes[rank - 1] if rank else None)


def check_copies(comm: MPI.Intracomm) -> None:
    """No call returns an object that a rank has given, or changes it."""

    def grow(a: list[int], b: list[int]) -> list[int]:
        a += b
        return a

    for fill in (1, 1000):
        mine = [comm.rank] * fill
        for found in (
            comm.bcast(mine),
            comm.allreduce(mine, grow),
            comm.reduce(mine, grow),
            comm.scan(mine, grow),
        ):
            assert found is not mine and mine == [comm.rank] * fill
        assert comm.exscan(mine, grow) is not mine and mine == [comm.rank] * fill


def check_beside_requests(comm: MPI.Intracomm) -> None:
    """Every other rank has a collective under way, in which it has to move bytes for others."""
    for length in (1, 100_000):
        for round_ in range(5):
            x = np.full(5, comm.rank if comm.rank != round_ % comm.size else 77)
            request = comm.Ibcast(x, round_ % comm.size)
            if comm.rank % 2:
                request.Wait()
            assert comm.allgather("z" * length) == ["z" * length] * comm.size
            assert comm.allreduce([comm.rank]) == list(range(comm.size))
            request.Wait()
            assert (x == 77).all()


def refusal(call: object) -> str:
    try:
        call()
    except (
        MPI.Exception,
        ValueError,
        TypeError,
        AttributeError,
        ZeroDivisionError,
        pickle.PicklingError,
    ) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def check_failures(comm: MPI.Intracomm) -> None:
    """One rank has nothing to send: it raises its own error, and those that were to get it name it."""
    last = comm.size - 1
    at_last, bad = comm.rank == last, lambda: None
    own = bad if at_last else 1

    def fails(a: int, b: int) -> float:
        return a / 0

    for call, told in (
        (lambda: comm.bcast(bad, last), "broadcast"),
        (lambda: comm.scatter([bad] * comm.size, last), "scatter"),
        (lambda: comm.gather(own, 0), "gather"),
        (lambda: comm.allgather(own), "all_gather"),
        (lambda: comm.alltoall([own] * comm.size), "all_to_all"),
        (lambda: comm.reduce(own), "reduce"),
        (lambda: comm.allreduce(own), "all_reduce"),
        (lambda: comm.scan(own), "scan"),
        (lambda: comm.exscan(own), "exscan"),
    ):
        text = refusal(call)
        if at_last:
            assert "lambda" in text, text
        else:
            assert f"{told}: rank {last} had no object to send: " in text, text
        assert comm.allgather(comm.rank) == list(range(comm.size))
    text = refusal(lambda: comm.allreduce(comm.rank, fails))
    assert "division by zero" in text and (comm.rank == 0 or "rank 0 had no object" in text), text


for comm in (world, world.Dup(), world.Split(0, -world.rank), MPI.COMM_SELF):
    for number, make in enumerate(OBJECTS):
        check(comm, make, number % comm.size)
    check_copies(comm)
    check_beside_requests(comm)
    if OURS and comm.size > 1:
        check_failures(comm)
halves = world.Split(world.rank % 2, world.rank)
for make in OBJECTS[:6]:
    check(halves, make, halves.size - 1)
if world.size > 1:
    sides = halves.Create_intercomm(0, world, 1 - world.rank % 2, 7)
    others = [(one, special(one)) for one in range(sides.remote_size)]
    for _ in range(6):
        assert sides.allgather((halves.rank, special(halves.rank))) == others
        assert sides.allreduce([halves.rank]) == list(range(sides.remote_size))
        root = MPI.PROC_NULL if halves.rank else MPI.ROOT
        from_first, to_second = sides.bcast("first", root if world.rank % 2 == 0 else 0), world.rank % 2
        assert from_first == ("first" if to_second else None)
print("all is well", flush=True)
