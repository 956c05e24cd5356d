"""`unisono run` with real processes: odd parents, lost signals, processes that do not die.

Some of what can happen takes the right moment or another user; a patch in the launcher's own process makes
it.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from effort import HANG_S, cases
from launching import DEFAULT_SIGNALS, Launcher, read_lines, wait_until
from ports import reserved
from python_runs import ran

PROGRAM = str(Path(__file__).with_name("launcher_program.py"))
PROGRAMS = Path(__file__).resolve().parent / "programs"


def _run_patched(
    launcher: Launcher, patch: str, script: str | Path, *flags: str, args: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `script` by a launcher in which `patch` was called first."""
    words = launcher.command(script, *flags, args=args)
    command = [*DEFAULT_SIGNALS, sys.executable, PROGRAM, patch, *words[words.index("run") :]]
    return subprocess.run(command, env=launcher.environ, capture_output=True, text=True, timeout=HANG_S)


# --- what a parent leaves to us ------------------------------------------------------------------------


@pytest.mark.parametrize("inherited", ["blocked", "ignored"])
def test_a_parents_way_with_children_is_not_ours(launcher: Launcher, inherited: str) -> None:
    parent = [sys.executable, str(PROGRAMS / "leaves_sigchld.py"), inherited]
    command = [*parent, *launcher.command("time.sleep(0.3); os._exit(3)", "-n", "1")]
    done = subprocess.run(command, env=launcher.environ, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr


# --- signals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "patch", ["another_thread_takes_it", "a_storm_of_ends_comes_first"], ids=["front", "supervisor"]
)
def test_no_signal_is_lost(launcher: Launcher, patch: str) -> None:
    assert _run_patched(launcher, patch, "time.sleep(50)", "-n", "1").returncode == 143


def test_the_front_has_one_thread_for_signals(launcher: Launcher) -> None:
    process = launcher.start("print('ready', flush=True); time.sleep(50)", "-n", "1")
    read_lines(process, 1)
    blocked = {}
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        mask = re.search(r"^SigBlk:\s*(\w+)", (task / "status").read_text(), re.MULTILINE)
        assert mask is not None
        blocked[int(task.name)] = bool(int(mask[1], 16) & 1 << (signal.SIGTERM - 1))
    process.terminate()
    process.communicate(timeout=HANG_S)
    assert not blocked.pop(process.pid)
    assert blocked and all(blocked.values())


def test_a_second_signal_does_not_interrupt_the_cleaning_up(launcher: Launcher) -> None:
    token = ("--token-file", str(launcher.folder / "token"))
    with reserved() as port:
        where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
        done = _run_patched(launcher, "a_second_signal_while_cleaning_up", "", *where, *token, "-n", "1")
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_that_has_ended_elsewhere_before_it_begins_here() -> None:
    done = ran(PROGRAM, "the_end_comes_with_the_assignment")
    assert (done.returncode, done.stderr) == (0, "")


def test_rank_that_dies_right_before_sigterm_is_a_failure(launcher: Launcher) -> None:
    script = "sys.exit(3) if rank == 1 else time.sleep(50)"
    done = _run_patched(launcher, "one_dies_before_it_is_asked", script, "-n", "2", "--grace", "0.1")
    assert "rank 0 failed too (SIGUSR1)" in done.stderr or "rank 0 failed first: SIGUSR1" in done.stderr


# --- what does not end ---------------------------------------------------------------------------------


def test_a_stray_that_dies_late_leaves_nobody_unnoticed(launcher: Launcher) -> None:
    """What it leaves is adopted when no kill was to come."""
    script, args = PROGRAMS / "leaves_one_that_dies_late.py", (str(launcher.folder / "ready"),)
    assert _run_patched(launcher, "no_kill_was_to_come", script, "-n", "1", args=args).returncode == 0


def test_strays_of_another_user_are_named_and_left_and_the_others_ended(launcher: Launcher) -> None:
    script = PROGRAMS / "leaves_two_shells.py"
    done = _run_patched(launcher, "it_cannot_be_signalled", script, "-n", "1")
    assert done.returncode == 0, done.stderr
    left = re.search(r"leaving without pid (\d+) \(sh, state \w\)", done.stderr)
    assert left is not None and "SIGKILL has not ended pid" in done.stderr and "Traceback" not in done.stderr
    found = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in launcher.alive()}
    assert not any(b"other" in words for words in found.values())
    for pid in sorted(found):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not launcher.alive())


def test_a_rank_that_cannot_be_killed_is_named_and_left(launcher: Launcher) -> None:
    script = PROGRAMS / "becomes_a_shell.py"
    done = _run_patched(launcher, "it_cannot_be_signalled", script, "-n", "2", "--grace", "0.1")
    assert done.returncode == 3, done.stderr
    assert re.search(r"leaving without rank 0, pid \d+ \(sh, state \w\)", done.stderr)
    assert "rank 1 failed first: exit code 3" in done.stderr
    for pid in launcher.alive():  # the shell dies with the supervisor, its child is nobody's
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not launcher.alive())


def test_nothing_is_computed_while_the_console_takes_nothing(launcher: Launcher) -> None:
    """Something was left behind, and has ended since: nothing is due any more."""
    process = launcher.start(PROGRAMS / "leaves_one_and_prints_a_lot.py", "-n", "1")
    below = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(below.read_text)
    supervisor = int(below.read_text())
    wait_until(lambda: len(launcher.alive()) == 2)  # front and supervisor
    time.sleep(0.7)  # until what was due would be
    before = _cpu_s(supervisor)
    time.sleep(1.0)
    used = _cpu_s(supervisor) - before
    process.communicate(timeout=HANG_S)
    assert used < 0.1 and process.returncode == 0


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    "number", cases([signal.SIGTERM, signal.SIGINT], long=[signal.SIGHUP]), ids=lambda each: each.name
)
def test_a_stopped_supervisor_ends_the_job_all_the_same(launcher: Launcher, number: signal.Signals) -> None:
    ignored = (str(int(number)), str(int(signal.SIGTERM)))
    with launcher.start(PROGRAMS / "ignores_signals.py", "-n", "1", args=ignored) as process:
        supervisor = int(read_lines(process, 1)[0].split()[-1])
        os.kill(supervisor, signal.SIGSTOP)
        wait_until(lambda: "State:\tT" in Path(f"/proc/{supervisor}/status").read_text())
        process.send_signal(number)
        assert process.wait(HANG_S) == 128 + number
