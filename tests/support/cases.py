"""Sets of calls that every transport has to do, each compared with NumPy: see `operations`."""

import unisono as un
from operations import Call, begin, finish, run
from unisono.engine.costs.machine import DEFAULTS
from unisono.plans import ALGORITHMS

SEGMENT_BYTES = DEFAULTS.segment_bytes

# Numbers of elements for every dtype and op: fewer than ranks, and less than a vector; many vectors and a
# remainder. The kind of a message depends on its bytes alone, see `sizes`.
FEW = (3, 1000)
FORMS = ("array", "list", "own")
RAGGED = ("all_to_all", "gather", "scatter")  # their blocks may differ in size


def sizes(itemsize: int, size: int) -> list[int]:
    """Numbers of elements at boundaries: none, one, odd, inline or staged, segment ends."""
    segment = SEGMENT_BYTES // itemsize
    small = [0, 1, 3, 40 // itemsize, 40 // itemsize + 1, 1000]
    return [*small, segment - 1, segment, segment + 1, segment // size + 1, 3 * segment + 7]


def all_reduce(group: un.Group, dtype: str, op: un.ReduceOp, algorithm: str | None, numel: int) -> None:
    run(group, "all_reduce", numel, dtype, op, algorithm=algorithm)


def reduce(group: un.Group, dtype: str, op: un.ReduceOp, algorithm: str | None, numel: int) -> None:
    for root in {0, group.size - 1}:
        run(group, "reduce", numel, dtype, op, algorithm=algorithm, root=root)


def reduce_scatter(
    group: un.Group, dtype: str, op: un.ReduceOp, algorithm: str | None, numel: int, in_place: bool
) -> None:
    form = "own" if in_place else "array"
    run(group, "reduce_scatter", numel, dtype, op, algorithm=algorithm, form=form)


def scans(group: un.Group, dtype: str, op: un.ReduceOp, algorithm: str | None, numel: int) -> None:
    if op is not un.AVG:
        run(group, "scan", numel, dtype, op, algorithm=algorithm)
        run(group, "exclusive_scan", numel, dtype, op, algorithm=algorithm)


def reductions(group: un.Group, dtype: str, op: un.ReduceOp, numel: int, *in_place: bool) -> None:
    """Rooted and scattering ones, by all algorithms. in_place: ways of reduce_scatter."""
    for algorithm in ALGORITHMS["reduce"]:
        reduce(group, dtype, op, algorithm, numel)
    for algorithm in ALGORITHMS["reduce_scatter"]:
        for way in in_place:
            reduce_scatter(group, dtype, op, algorithm, numel, in_place=way)
    for algorithm in ALGORITHMS["scan"]:
        scans(group, dtype, op, algorithm, numel)


def moves(group: un.Group, dtype: str, numel: int) -> None:
    """All collectives without reductions, with every algorithm."""
    last = group.size - 1
    for kind in ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier"):
        for algorithm in ALGORITHMS[kind]:
            for root in {0, last} if kind == "broadcast" else (last,):
                for form in FORMS if kind == "all_gather" else ("array",):
                    run(group, kind, numel, dtype, algorithm=algorithm, root=root, form=form)


def uneven(group: un.Group, dtype: str = "float32") -> None:
    """The variants whose blocks differ in size."""
    for numel in (3, 200_000):
        for algorithm in (None, *ALGORITHMS["all_gather"]):
            run(group, "all_gather_v", numel, dtype, algorithm=algorithm)
        for kind in RAGGED:
            run(group, kind, numel, dtype, form="list")


def in_flight(group: un.Group, rounds: int = 6, algorithm: str | None = "two_shot") -> None:
    """Several sets of operations under way at once, waited for in another order than started."""
    turns = []
    for number in range(rounds):
        numel = [1, 1000, 300_000][number % 3]
        reducing = Call("all_reduce", "float64", un.SUM, (numel,), 0, algorithm, async_op=True, seed=number)
        turns += [begin(group, reducing, number)]
        turns += [begin(group, Call("all_gather", "int64", un.SUM, (5,), async_op=True, seed=number), number)]
    run(group, "all_reduce", 1)  # behind everything that was queued
    for turn in reversed(turns):
        finish(turn)
