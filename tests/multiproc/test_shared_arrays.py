"""Arrays of `un.empty` between processes: read where they lie, and what happens where they cannot be."""

from pathlib import Path

import pytest

import ranks
from python_runs import PATH, fine

PROGRAM = Path(__file__).resolve().parent / "programs" / "shares_arrays.py"
pytestmark = pytest.mark.needs("other processes")


def test_shared_arrays_are_mapped_by_their_readers() -> None:
    for output in ranks.processes(3, PROGRAM, "maps"):
        assert "mapped 3" in output, output
        assert "then 1" in output, output  # its own


@pytest.mark.parametrize("shared", [(0, 1), (0,), (1,)])
def test_both_ends_of_a_loan_may_be_mapped(shared: tuple[int, ...]) -> None:
    """A sender with nothing else to do copies, too, into what it has mapped or by system calls."""
    ranks.processes(2, PROGRAM, "sends_without_copy", *map(str, shared))


def test_who_has_no_such_memory_goes_with_those_who_have() -> None:
    outputs = ranks.processes(2, PROGRAM, "cannot_on_rank_1")
    assert ["mapped 1" in output for output in outputs] == [True, True], outputs


def test_a_descriptor_that_was_closed_costs_copies_only() -> None:
    """Somebody closes all descriptors that it does not know, and one of them is another file's afterwards."""
    outputs = ranks.processes(2, PROGRAM, "closes_descriptors")
    assert all("mapped 1" in output for output in outputs)


def held(collective: str, ending: str) -> dict[str, str]:
    """What sender and reader say when the reader was held in the middle of a message."""
    program = Path(__file__).with_name("held_program.py")
    printed = fine(program, collective, ending, **PATH)
    return dict(line.split(": ", 1) for line in printed.splitlines())


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_a_reader_that_is_killed_takes_nothing_with_it(collective: str) -> None:
    said = held(collective, "kill")
    assert list(said) == ["sender"]
    assert said["sender"].startswith(f"PeerLost: {collective} failed: rank 1"), said


@pytest.mark.parametrize(
    ("collective", "read"), [("reduce_scatter", "[2.0, 8.0]"), ("all_gather", "[1.0, 7.0]")]
)
def test_memory_that_was_given_back_is_no_result(collective: str, read: str) -> None:
    """Who comes to read what its sender has put there since, after it gave up, is told so."""
    said = held(collective, "abort")
    assert said["sender"].startswith(f"Aborted: {collective} failed: rank 0"), said
    assert said["reader"].startswith(f"{read} Aborted: {collective} failed: rank 0"), said


def test_a_forks_child_makes_a_group_with_the_same_peer() -> None:
    """What its parent has mapped of that peer is not mapped in the child."""
    assert "fine" in ranks.processes(2, PROGRAM, "forks")[0]
