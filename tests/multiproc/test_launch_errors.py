"""`unisono run` shows what ranks raise once, and writes it for machines. Real processes."""

import json
import time
from pathlib import Path

import pytest

from effort import HANG_S
from launching import Launcher

PROGRAMS = Path(__file__).resolve().parent / "programs"


MISMATCH = PROGRAMS / "calls_another_thing.py"


def test_a_mismatch_of_all_is_one_table_and_nobody_is_first(launcher: Launcher) -> None:
    done = launcher.run(MISMATCH, "-n", "3")
    assert done.returncode == 1
    assert "unisono run: ranks 0-2 failed together: exit code 1\n" in done.stderr
    assert (
        done.stderr.count("Mismatch: ranks called different things") == 1
    )  # who was odd: where all had come
    assert done.stderr.count("rank 1  #1 broadcast(float32[4], root=0") == 1
    assert done.stderr.count("Traceback (most recent call last)") == 2  # of two places in the source
    assert "\n  ranks 0, 2:\n" in done.stderr and "\n  rank 1:\n" in done.stderr
    assert "/unisono/engine/group/" not in done.stderr and "failed first" not in done.stderr


def test_own_frames_and_log_files_have_all(launcher: Launcher, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    done = launcher.run(MISMATCH, "-n", "3", "--full-tracebacks", "--log-dir", str(logs))
    assert "/unisono/engine/group/" in done.stderr
    assert done.stderr.count("ranks called different things") == 1
    for rank in range(3):
        text = (logs / f"rank{rank}.stderr.log").read_text()
        assert text.count("Traceback (most recent call last)") == 1 and "/unisono/engine/group/" in text
        assert text.count("ranks called different things") == 1 and f"rank={rank}/3" in text


def test_the_record_names_every_rank_and_its_fault(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "errors.json"
    flags = ("-n", "3", "--grace", "20", "--json-errors", str(file))
    done = launcher.run(PROGRAMS / "is_killed.py", *flags)
    record = json.loads(file.read_text())
    assert record["status"] == done.returncode == 137 and record["first"] == [1]
    zero, one, two = record["ranks"]
    assert one["signaled"] and one["code"] == 9 and one["error"] is None
    for each in (zero, two):
        report = each["error"]["report"]
        assert each["error"]["type"] == "unisono.errors.PeerLost" and each["error"]["lost"]
        assert (report["kind"], report["rank"], report["pid"], report["signal"]) == (
            "peer_lost", 1, one["pid"], 9,
        )  # fmt: skip
        assert [state["rank"] for state in report["ranks"]] == [0, 1, 2]
    assert "then ranks 0, 2 failed because rank 1 was gone (exit code 1)" in done.stderr


def test_a_job_that_does_well_has_a_record(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "errors.json"
    assert launcher.run("", "-n", "2", "--json-errors", str(file)).returncode == 0
    record = json.loads(file.read_text())
    assert (record["status"], record["first"], len(record["ranks"])) == (0, [], 2)


def test_a_record_that_cannot_be_written_is_said_before_anything_starts(
    launcher: Launcher, tmp_path: Path
) -> None:
    done = launcher.run("", "--json-errors", str(tmp_path / "no" / "such.json"))
    assert done.returncode == 2 and "--json-errors" in done.stderr


def test_an_error_is_shown_although_its_rank_does_not_end(launcher: Launcher) -> None:
    process = launcher.start(PROGRAMS / "fails_and_stays.py", "-n", "2", "--grace", "600")
    assert process.stderr is not None
    said = ""
    end = time.monotonic() + 60
    while "timed out after 0.5 s" not in said:
        assert time.monotonic() < end, said
        said += process.stderr.readline()
    process.terminate()
    process.communicate(timeout=HANG_S)


@pytest.mark.parametrize("gone", ["closed", "replaced"])
def test_who_cannot_hand_over_prints(launcher: Launcher, gone: str) -> None:
    done = launcher.run(PROGRAMS / "cannot_hand_over.py", "-n", "1", args=(gone,))
    assert "[rank 0] unisono.errors.Mismatch: of my own" in done.stderr
    assert "rank 0 failed first: exit code 1" in done.stderr


def test_a_hook_of_the_caller_is_called(launcher: Launcher) -> None:
    done = launcher.run(PROGRAMS / "has_a_hook.py", "-n", "1")
    assert "[rank 0] my own hook: for it" in done.stderr


def test_the_exception_keeps_its_whole_traceback(launcher: Launcher) -> None:
    done = launcher.run(PROGRAMS / "catches_a_timeout.py", "-n", "2")
    assert "[rank 0] (1,) timeout True" in done.stdout
