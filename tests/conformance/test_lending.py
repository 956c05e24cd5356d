"""Messages that go from one rank's memory straight to another's: real processes, and what cannot be lent."""

from __future__ import annotations

import numpy as np
import pytest

import ranks
import unisono as un

EXCHANGE = """
import mmap
p, rank = group.size, group.rank
right, left = (rank + 1) % p, (rank - 1) % p

def given(numel, kind):
    if kind == "ordinary":
        return np.zeros(numel, np.float32)
    # Memory that this process may write only: other processes cannot read it, as that of a device.
    return np.frombuffer(mmap.mmap(-1, 4 * numel, prot=mmap.PROT_WRITE), np.float32)

for kind in ("ordinary", "closed"):
    for numel in (1000, 70_001, 1_100_001):
        x, got = given(numel, kind), given(numel, kind)
        x[:] = np.arange(numel) + rank
        assert group.sendrecv(x, right, got, left) == left
        assert (got == np.arange(numel) + left).all(), (kind, numel)
        out = given(p * numel, kind).reshape(p, numel)
        group.all_gather(out, x)
        assert all((out[r] == np.arange(numel) + r).all() for r in range(p)), (kind, numel)
        group.all_to_all(got := given(p * numel, kind).reshape(p, numel), out)
        assert all((got[r] == np.arange(numel) + rank).all() for r in range(p)), (kind, numel)
        group.broadcast(x, src=p - 1)
        assert (x == np.arange(numel) + p - 1).all(), (kind, numel)
        if p == 2:  # both send first
            group.send(x + rank, right)
            group.recv(got[0], left)
            assert (got[0] == np.arange(numel) + p - 1 + left).all(), (kind, numel)
print("done")
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("lending", ["1", "0"])
def test_processes(size: int, lending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_LENDING", lending)
    assert ranks.run(size, EXCHANGE) == ["done\n"] * size


@pytest.mark.parametrize("lending", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_threads(size: int, lending: bool) -> None:
    def work(group: un.Group) -> None:
        x = np.arange(600_000.0) + group.rank
        out = np.zeros((size, 600_000))
        for _ in range(5):
            group.all_gather(out, x)
            assert all((out[rank] == np.arange(600_000.0) + rank).all() for rank in range(size))
            got = np.empty_like(x)
            group.sendrecv(x, (group.rank + 1) % size, got, (group.rank - 1) % size)
            assert (got == np.arange(600_000.0) + (group.rank - 1) % size).all()

    ranks.threads(size, work, lending=lending, cores=size)


def test_what_a_sender_takes_back_is_not_received() -> None:
    """Who closes with a message on its way may write to its memory: all of it has come, or an error."""
    told = ranks.run(
        2,
        """
for turn in range(20):
    inner = group.subgroup([0, 1])
    x = np.zeros(1 << 20)
    if group.rank == 0:
        x[:] = 1
        work = inner.isend(x, 1)
        time.sleep(turn % 5 * 2e-4)
        inner.close()
        x[:] = 2
    else:
        try:
            inner.recv(x, 0)
            assert (x == 1).all(), f"turn {turn}: {np.unique(x)}"
        except un.GroupError:
            pass
        inner.close()
    group.barrier()
print("fine")
""",
    )
    assert told == ["fine\n"] * 2
