"""With more ranks than cores large messages to one receiver take more of their chunk than a segment."""

from pathlib import Path

import numpy as np

import ranks
import unisono as un
from effort import cases
from loops import each
from unisono.plans import ALGORITHMS

SMALL = 1000  # elements of four bytes
LEAST = 1 << 18  # the fewest that run ahead
SIZES = [LEAST - 1, LEAST, 3 * LEAST + 17, 4 * LEAST, 9 * LEAST + 1]  # 4 MiB at a time


def mark(numel: int, sender: int, receiver: int) -> np.ndarray:
    return (np.arange(numel) * 7 + 100 * sender + receiver).astype(np.int32)


@each("shared", [False, True])
@each("algorithm", ALGORITHMS["all_to_all"])
@each("size", cases([3], long=[2, 4]))
def test_all_to_all_runs_ahead(size: int, algorithm: str, shared: bool) -> None:
    make = un.empty if shared else np.empty

    def work(group: un.Group) -> None:
        me, everybody = group.rank, range(size)
        for numel in SIZES:
            given, got = make((size, numel), np.int32), make((size, numel), np.int32)
            for peer in everybody:
                given[peer] = mark(numel, me, peer)
            group.all_to_all(got, given, algorithm=algorithm)
            given[:] = -1  # the caller's again
            assert all((got[peer] == mark(numel, peer, me)).all() for peer in everybody), numel

    ranks.threads(size, work, zero_copy=True, cores=1)


@each("size", cases([2, 4], long=[3]))
def test_blocks_of_many_sizes(size: int) -> None:
    """Large ones run ahead, small and empty ones beside them do not; nobody knows the others' sizes."""
    sizes = [0, SMALL, *SIZES]

    def numel(sender: int, receiver: int) -> int:
        return sizes[(3 * sender + 5 * receiver) % len(sizes)]

    def work(group: un.Group) -> None:
        me, everybody = group.rank, range(size)
        for _ in range(2):
            given = [mark(numel(me, peer), me, peer) for peer in everybody]
            got = [np.empty(numel(peer, me), np.int32) for peer in everybody]
            group.all_to_all(got, given)
            assert all((got[peer] == mark(numel(peer, me), peer, me)).all() for peer in everybody)
            own = mark(sizes[me + 1], me, 0)
            outs = [np.empty(sizes[peer + 1], np.int32) for peer in everybody]
            group.gather(own, outs if me == 1 else None, 1)
            if me == 1:
                assert all((outs[peer] == mark(sizes[peer + 1], peer, 0)).all() for peer in everybody)

    ranks.threads(size, work, zero_copy=True, cores=1)


@each("size", cases([2, 4], long=[3]))
def test_gather_and_scatter(size: int) -> None:
    def work(group: un.Group) -> None:
        for numel in SIZES:
            for collected in ALGORITHMS["gather"]:
                blocks = np.empty((size, numel), np.int32) if group.rank == 0 else None
                group.gather(mark(numel, group.rank, 0), blocks, 0, algorithm=collected)
                if blocks is not None:
                    assert all((blocks[peer] == mark(numel, peer, 0)).all() for peer in range(size))
            for dealt in ALGORITHMS["scatter"]:
                given = np.stack([mark(numel, 0, peer) for peer in range(size)]) if group.rank == 0 else None
                block = np.empty(numel, np.int32)
                group.scatter(block, given, 0, algorithm=dealt)
                assert (block == mark(numel, 0, group.rank)).all()

    ranks.threads(size, work, zero_copy=True, cores=1)


@each("algorithm", ALGORITHMS["broadcast"])
@each("size", cases([2, 5], long=[3, 4]))
def test_forwarded_chunks_run_ahead(size: int, algorithm: str) -> None:
    """In trees a rank sends on what came ahead, in several pieces."""

    def work(group: un.Group) -> None:
        for numel in SIZES:
            for root in (0, size - 1):
                x = mark(numel, root, 0) if group.rank == root else np.zeros(numel, np.int32)
                group.broadcast(x, root, algorithm=algorithm)
                assert (x == mark(numel, root, 0)).all()

    ranks.threads(size, work, zero_copy=True, cores=1)


def test_two_ranks_gather_all() -> None:
    def work(group: un.Group) -> None:
        for numel in SIZES:
            blocks = np.empty((2, numel), np.int32)
            group.all_gather(blocks, mark(numel, group.rank, 0))
            assert all((blocks[peer] == mark(numel, peer, 0)).all() for peer in range(2))

    ranks.threads(2, work, zero_copy=True, cores=1)


def test_processes_run_ahead() -> None:
    """More of them than cores; one arrives late, one has memory that others cannot read."""
    program = Path(__file__).resolve().parent / "programs" / "runs_ahead_on_one_core.py"
    assert ranks.processes(3, program) == ["done\n"] * 3
