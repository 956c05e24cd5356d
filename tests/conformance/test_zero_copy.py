"""Messages that go from one rank's memory straight to another's: real processes, and what cannot be sent
so.
"""

import mmap
from pathlib import Path

import numpy as np
import pytest

import ranks
import unisono as un
from loops import each

PROGRAMS = Path(__file__).resolve().parent / "programs"


def given(numel: int, kind: str) -> np.ndarray:
    if kind == "ordinary":
        return np.zeros(numel, np.float32)
    # Memory that this process may write only: other processes cannot read it, as that of a device.
    return np.frombuffer(mmap.mmap(-1, 4 * numel, prot=mmap.PROT_WRITE), np.float32)


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("zero_copy", ["1", "0"])
@each("kind", ["ordinary", "closed"])
@each("numel", [1000, 70_001, 1_100_001])
def test_lent_collectives_between_processes(
    kind: str, numel: int, zero_copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank sends arrays that others can read and such that they cannot."""
    monkeypatch.setenv("UNISONO_ZERO_COPY", zero_copy)
    with un.init_process_group(init_method="env://", group_name=f"{kind} {numel}") as group:
        p, rank = group.size, group.rank
        right, left = (rank + 1) % p, (rank - 1) % p
        x, got = given(numel, kind), given(numel, kind)
        x[:] = np.arange(numel) + rank
        assert group.sendrecv(x, right, got, left) == left
        assert (got == np.arange(numel) + left).all()
        out = given(p * numel, kind).reshape(p, numel)
        group.all_gather(out, x)
        assert all((out[r] == np.arange(numel) + r).all() for r in range(p))
        group.all_to_all(got := given(p * numel, kind).reshape(p, numel), out)
        assert all((got[r] == np.arange(numel) + rank).all() for r in range(p))
        group.broadcast(x, src=p - 1)
        assert (x == np.arange(numel) + p - 1).all()
        if p == 2:  # both send first
            group.send(x + rank, right)
            group.recv(got[0], left)
            assert (got[0] == np.arange(numel) + p - 1 + left).all()


@pytest.mark.ranks([2])
@each("sizes", [(131_072, 131_073), (200_000, 9_000_001), (1 << 20, 1 << 20), (1, 2_500_000), (70_000, 0)])
def test_exchange_of_unequal_messages(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that sends and receives reads in larger pieces, alone; Python has no part in it."""
    with un.init_process_group(init_method="env://", group_name=f"{sizes}") as group:
        monkeypatch.setattr("unisono.engine.group.group.together", None)
        peer = 1 - group.rank
        x, out = (np.zeros(sizes[rank], np.uint8) for rank in (group.rank, peer))
        for number in range(3):
            x[:] = np.arange(x.size) + group.rank + number
            status = group.sendrecv(x, peer, out, peer)
            assert (status.source, status.numel) == (peer, out.size)
            assert (out == (np.arange(out.size) + peer + number).astype(np.uint8)).all()


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_lent_collectives_between_threads(size: int, zero_copy: bool) -> None:
    def work(group: un.Group) -> None:
        x = np.arange(600_000.0) + group.rank
        out = np.zeros((size, 600_000))
        for _ in range(5):
            group.all_gather(out, x)
            assert all((out[rank] == np.arange(600_000.0) + rank).all() for rank in range(size))
            got = np.empty_like(x)
            group.sendrecv(x, (group.rank + 1) % size, got, (group.rank - 1) % size)
            assert (got == np.arange(600_000.0) + (group.rank - 1) % size).all()

    ranks.threads(size, work, zero_copy=zero_copy, cores=size)


def test_message_of_a_closed_sender_is_whole_or_an_error() -> None:
    """Who closes with a message on its way may write to its memory: all of it has come, or an error."""
    told = ranks.processes(2, PROGRAMS / "closes_with_a_message_on_its_way.py")
    assert told == ["fine\n"] * 2


# ---- the memory of a process as it was then, not of whatever has its number later ----


PROGRAM = Path(__file__).resolve().parent / "programs" / "lends_and_becomes_another.py"


@pytest.mark.needs("other processes")
def test_memory_of_an_execed_program_is_not_received() -> None:
    assert ranks.processes(2, PROGRAM) == ["fine\n"] * 2
