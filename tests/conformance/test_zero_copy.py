"""Messages that go from one rank's memory straight to another's: real processes, and what cannot be sent
so.
"""

from pathlib import Path

import numpy as np
import pytest

import ranks
import unisono as un

PROGRAMS = Path(__file__).resolve().parent / "programs"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("zero_copy", ["1", "0"])
def test_lent_collectives_between_processes(
    size: int, zero_copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_ZERO_COPY", zero_copy)
    assert ranks.processes(size, PROGRAMS / "exchanges.py") == ["done\n"] * size


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


def test_memory_of_an_execed_program_is_not_received() -> None:
    assert ranks.processes(2, PROGRAM) == ["fine\n"] * 2
