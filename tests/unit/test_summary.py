"""Which rank failed first, which failed of the same, and how that is said once. No rank, no process."""

from __future__ import annotations

import json

import pytest

from unisono.commands.launch.failures import (
    RankExit,
    blocks,
    exit_status,
    first_failure,
    follow_up,
    json_record,
    last_lines,
    report,
    same_failure,
)
from unisono.engine.diagnosis.fault_text import text
from unisono.engine.diagnosis.report import CallDescription, FaultReport, RankSnapshot, UncaughtError

HEAD = "Traceback (most recent call last):\n"
TRACEBACK = HEAD + '  File "x.py", line 1\n{}: told\n'


def uncaught(rank: int, message: str = "ValueError: told", *, line: int = 1, **more: object) -> UncaughtError:
    frames = f'{HEAD}  File "x.py", line {line}\n'
    ours = f'{frames}  File "unisono/engine/group.py", line 9\n'
    given = {"type": message.partition(":")[0], "frames": frames, "all_frames": ours, "at": 5.0, **more}
    return UncaughtError(rank=rank, pid=100 + rank, message=message + "\n", **given)  # type: ignore[arg-type]


def ended(rank: int, order: int, error: UncaughtError | None = None, **more: object) -> RankExit:
    given = {"pid": 100 + rank, "code": 1, "error": error, **more}
    return RankExit(rank=rank, order=order, **given)  # type: ignore[arg-type]


def lost(rank: int, order: int, *, peer: int = 4) -> RankExit:
    found = fault(rank, 8, "peer_lost", rank=peer, pid=100 + peer)
    return ended(rank, order, uncaught(rank, f"PeerLost: {text(found)}", lost=True, report=found, at=1.0))


def fault(reporter: int, size: int, kind: str, **more: object) -> FaultReport:
    call = CallDescription("all_reduce", ("float32[4]",))
    ranks = tuple(
        RankSnapshot(r, "a", 100 + r, 2, 1, "in all_reduce #2", call, f"x.py:{r}") for r in range(size)
    )
    given = {"operation": "all_reduce", "found_by": 0, "group": "world", "ranks": ranks, **more}
    return FaultReport(kind=kind, size=size, reporter=reporter, **given)  # type: ignore[arg-type]


def mismatch(rank: int, size: int, *, line: int = 1) -> RankExit:
    found = fault(rank, size, "mismatch", sequence=2)
    error = uncaught(rank, f"Mismatch: {text(found)}", line=line, report=found, at=9.0 - rank)
    return ended(rank, rank, error)


def test_first_failure_is_the_cause_not_the_quickest() -> None:
    cause = ended(1, 1, uncaught(1))
    assert first_failure([lost(0, 0), cause]) == cause
    assert first_failure([lost(0, 0)]) == lost(0, 0)
    assert first_failure([ended(0, 0, code=0), ended(1, 1, asked=True)]) is None


def test_who_raised_first_failed_first_however_long_its_end_takes() -> None:
    cause = ended(1, 1, uncaught(1, at=1.0), ended_at=9.0)
    assert first_failure([ended(0, 0, uncaught(0, "KeyError: x", at=2.0), ended_at=3.0), cause]) == cause


def test_a_signal_is_a_cause_whatever_was_handed_over() -> None:
    killed = ended(1, 1, uncaught(1, lost=True), code=9, signaled=True)
    assert first_failure([lost(0, 0), killed]) == killed
    assert exit_status(killed) == 137


def test_words_that_only_look_like_a_lost_peer_are_no_consequence() -> None:
    first = ended(0, 0, uncaught(0, "ValueError: PeerLost, Aborted, Connection reset", at=1.0))
    assert first_failure([first, ended(1, 1, uncaught(1, at=2.0))]) == first


def test_last_lines_are_the_whole_last_chain() -> None:
    stderr = (
        TRACEBACK.format("OSError")
        + "handled, going on\n"
        + TRACEBACK.format("KeyError")
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + TRACEBACK.format("ValueError")
    )
    lines = last_lines(stderr.encode(), 0, fatal=False)
    assert lines[0].startswith("Traceback") and "KeyError: told" in lines and lines[-1] == "ValueError: told"
    assert "OSError: told" not in lines


def test_last_lines_without_a_traceback_and_in_colour() -> None:
    assert last_lines(b"".join(b"%d\n" % i for i in range(9)), 0, fatal=False) == ("4", "5", "6", "7", "8")
    colored = b"\x1b[35mTraceback (most recent call last):\x1b[0m\nE: x\n"
    assert last_lines(colored, 0, fatal=False)[0].startswith("Trace")
    torch_prefix = TRACEBACK.format("E").replace("\n", "\n[rank1]: ").encode()
    assert last_lines(b"[rank1]: " + torch_prefix, 1, fatal=False)[0] == HEAD.strip()
    fatal = b"a\nFatal Python error: Segmentation fault\n\nCurrent thread:\n"
    assert last_lines(fatal, 0, fatal=True)[0].startswith("Fatal")
    assert len(last_lines((TRACEBACK.format("x" * 9) + "y\n" * 5000).encode(), 0, fatal=False)) < 70


@pytest.mark.parametrize("kind", ["Timeout", "RendezvousError"])
def test_the_first_line_names_who_never_came_not_who_gave_up(kind: str) -> None:
    one = ended(0, 0, uncaught(0, f"{kind}: gave up", missing=(1, 3)))
    lines = report(one, [one], log_dir=None).splitlines()
    assert lines[0] == (
        "unisono run: ranks 1, 3 never arrived; rank 0 gave up waiting first: exit code 1 (pid 100)"
    )
    two = ended(2, 1, uncaught(2, f"{kind}: gave up", missing=(1, 3)))
    late = ended(1, 2, uncaught(1, f"{kind}: gave up", missing=(1, 3)))
    lines = report(one, [one, two, late], log_dir=None).splitlines()
    assert lines[0] == "unisono run: ranks 1, 3 never arrived; ranks 0, 2 gave up waiting: exit code 1"
    assert lines[-1] == "unisono run: then rank 1 failed too (exit code 1)"


def test_report_names_ranks_shortly_and_who_was_gone() -> None:
    others = [lost(r, r) for r in (0, 1, 2, 5)] + [ended(6, 7, asked=True, code=15, signaled=True)]
    last = "rank 6 was ended by the launcher"
    said = report(ended(4, 0, code=11, signaled=True), [*others, ended(4, 0)], log_dir="logs")
    assert said.splitlines() == [
        "unisono run: rank 4 failed first: SIGSEGV (pid 104)",
        f"unisono run: then ranks 0-2, 5 failed because rank 4 was gone (exit code 1); {last}",
        "unisono run: full output in logs",
    ]
    assert follow_up([lost(0, 0, peer=7)]) == (
        "unisono run: then on this node rank 0 failed because a peer was gone (exit code 1)"
    )


def test_what_64_ranks_raise_together_is_one_table_and_nobody_is_first() -> None:
    ends = [mismatch(rank, 64, line=7 if rank == 9 else 5) for rank in range(64)]
    first = first_failure(ends)
    assert first is not None and len(same_failure(first, ends)) == 64
    said = report(first, ends, log_dir=None)
    lines = said.splitlines()
    assert lines[0] == "unisono run: ranks 0-63 failed together: exit code 1"
    assert "  ranks 0-8, 10-63:" in lines and "  rank 9:" in lines
    assert said.count("Mismatch: ranks called different things") == 1
    assert said.count("rank 17  #2 all_reduce(float32[4])  at x.py:17") == 1
    assert "rank=" not in said and len(lines) < 80


def test_more_places_than_one_can_read_are_counted() -> None:
    ends = [mismatch(rank, 9, line=rank) for rank in range(9)]
    said = report(ends[0], ends, log_dir=None)
    assert said.count("Traceback") == 4 and "  ranks 4-8: at 5 other places" in said


def test_own_frames_are_shown_when_asked_for() -> None:
    ends = [mismatch(rank, 2) for rank in range(2)]
    assert "unisono/engine/group.py" not in report(ends[0], ends, log_dir=None)
    assert "unisono/engine/group.py" in report(ends[0], ends, log_dir=None, full=True)


def test_consequences_of_one_fault_are_one_block_and_what_a_rank_printed_is_none() -> None:
    printed = ended(4, 0, uncaught(4, printed=True))
    found = blocks([lost(0, 1), lost(1, 2), printed], full=False)
    assert len(found) == 1 and found[0].startswith("ranks 0-1:\n  Traceback")
    assert found[0].count("PeerLost:") == 1


def test_faults_of_two_groups_are_two() -> None:
    one, other = mismatch(0, 2), mismatch(1, 2)
    assert other.error is not None and other.error.report is not None
    found = fault(1, 2, "mismatch", sequence=2, group="rows")
    other = ended(1, 1, uncaught(1, "Mismatch: x", report=found))
    assert same_failure(one, [one, other]) == [one]


def test_the_record_for_machines() -> None:
    ends = [lost(0, 1), ended(4, 0, code=9, signaled=True)]
    record = json.loads(json_record(ends, 137))
    assert (record["status"], record["first"]) == (137, [4])
    assert [each["rank"] for each in record["ranks"]] == [0, 4]
    assert record["ranks"][0]["error"]["report"]["kind"] == "peer_lost"
    assert record["ranks"][0]["error"]["report"]["pid"] == 104
    assert record["ranks"][1]["signaled"] is True and record["ranks"][1]["error"] is None
