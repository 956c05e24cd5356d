"""`unisono run` with real processes: odd parents, lost signals, processes that do not die.

Some of what can happen takes the right moment or another user; a patch in the launcher's own process makes
it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import DEFAULT_SIGNALS, Launcher, launching, read_lines, wait_until
from ports import reserved

BOUND_S = 60.0  # for what ends in a second or two, and without the mend never


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


def _run_patched(
    launcher: Launcher, patch: str, script: str, *flags: str
) -> subprocess.CompletedProcess[str]:
    """Run `script` by a launcher in which `patch` was executed first."""
    words = launcher.command(script, *flags)
    words = words[words.index("run") :]
    imports = "import os, signal, sys, threading, time\nfrom unisono import cli\n"
    program = imports + patch + "\nsys.exit(cli.main(sys.argv[1:]))"
    command = [*DEFAULT_SIGNALS, sys.executable, "-c", program, *words]
    return subprocess.run(command, env=launcher.environ, capture_output=True, text=True, timeout=BOUND_S)


# --- what a parent leaves to us ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inherited",
    [
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    ],
    ids=["blocked", "ignored"],
)
def test_a_parents_way_with_children_is_not_ours(launcher: Launcher, inherited: str) -> None:
    program = f"import os, signal, sys; {inherited}; os.execvp(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", program, *launcher.command("time.sleep(0.3); os._exit(3)", "-n", "1")]
    done = subprocess.run(command, env=launcher.environ, capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr


# --- signals -------------------------------------------------------------------------------------------

ANOTHER_THREAD_TAKES_IT = """
from unisono.launch import front
assign = front._assign
def take_a_signal():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
def assign_and_go_on(*given):
    assign(*given)
    threading.Thread(target=take_a_signal, daemon=True).start()
front._assign = assign_and_go_on
"""

A_STORM_OF_ENDS_COMES_FIRST = """
from unisono.launch.supervisor import Supervisor
start = Supervisor._start_ranks
def start_in_a_storm(supervisor):
    start(supervisor)
    for _ in range(2000):
        signal.raise_signal(signal.SIGCHLD)
    signal.raise_signal(signal.SIGTERM)
Supervisor._start_ranks = start_in_a_storm
"""


@pytest.mark.parametrize(
    "patch", [ANOTHER_THREAD_TAKES_IT, A_STORM_OF_ENDS_COMES_FIRST], ids=["front", "supervisor"]
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
    process.communicate(timeout=BOUND_S)
    assert not blocked.pop(process.pid)
    assert blocked and all(blocked.values())


A_SECOND_SIGNAL_WHILE_CLEANING_UP = """
from unisono.launch.nodes import Nodes
close, front = os.close, os.getpid()
def close_late(fd):
    close(fd)
    if os.getpid() == front and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.raise_signal(signal.SIGINT)
def interrupted(nodes, port):
    os.close = close_late
    signal.raise_signal(signal.SIGINT)
Nodes.meet = interrupted
"""


def test_a_second_signal_does_not_interrupt_the_cleaning_up(launcher: Launcher) -> None:
    token = ("--token-file", str(launcher.folder / "token"))
    with reserved() as port:
        where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
        done = _run_patched(launcher, A_SECOND_SIGNAL_WHILE_CLEANING_UP, "", *where, *token, "-n", "1")
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr


THE_END_COMES_WITH_THE_ASSIGNMENT = """
import dataclasses, json, os, sys
from unisono.launch.front import _supervise
from unisono.launch.job import Assignment, Job
read, write = os.pipe()
os.write(write, json.dumps(dataclasses.asdict(Assignment("127.0.0.1:1", 1, 0, 1))).encode() + b"\\nend\\n")
sys.exit(_supervise(Job(("sleep", "300"), 1, (3,), (0,), grace_s=0.1), dict(os.environ), read, -1))
"""


def test_a_job_that_has_ended_elsewhere_before_it_begins_here() -> None:
    command = [sys.executable, "-c", THE_END_COMES_WITH_THE_ASSIGNMENT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S)
    assert (done.returncode, done.stderr) == (0, "")


ONE_DIES_BEFORE_IT_IS_ASKED = """
from unisono.launch.process import Escalation
from unisono.launch.process import children
pop = Escalation.pop
def pop_late(escalation, now):
    number = pop(escalation, now)
    if number == signal.SIGTERM:
        for pid in children():
            os.kill(pid, signal.SIGUSR1)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return number
Escalation.pop = pop_late
"""


def test_who_died_right_before_it_was_to_be_ended_died_by_itself(launcher: Launcher) -> None:
    script = "sys.exit(3) if rank == 1 else time.sleep(50)"
    done = _run_patched(launcher, ONE_DIES_BEFORE_IT_IS_ASKED, script, "-n", "2", "--grace", "0.1")
    assert "rank 0 failed too (SIGUSR1)" in done.stderr or "rank 0 failed first: SIGUSR1" in done.stderr


# --- what does not end ---------------------------------------------------------------------------------


def test_a_stray_that_dies_late_leaves_nobody_unnoticed(launcher: Launcher) -> None:
    """What it leaves is adopted when no kill was to come."""
    script = """
import pathlib
ready = pathlib.Path(sys.argv[0] + ".ready")
subprocess.Popen(["sh", "-c", f"trap '' TERM; sleep 999 & touch {ready}; wait"])
until(ready.exists)
"""
    patch = "from unisono.launch import process, supervisor\nprocess.KILL_AGAIN = supervisor.KILL_AGAIN = []"
    assert _run_patched(launcher, patch, script, "-n", "1").returncode == 0


IT_CANNOT_BE_SIGNALLED = """
from unisono.launch import process, supervisor
supervisor.AFTER_FAILURE_S = 0.1
process.TELL_S, process.LEAVE_S = 0.1, 0.3
kill, killpg = os.kill, os.killpg
def protect(send):
    def send_to_others(pid, number):
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            if b"protected" in words.read():
                raise PermissionError(1, "Operation not permitted")
        send(pid, number)
    return send_to_others
os.kill, os.killpg = protect(os.kill), protect(os.killpg)
"""


def test_strays_of_another_user_are_named_and_left_and_the_others_ended(launcher: Launcher) -> None:
    script = """
for name in ("protected", "other"):
    subprocess.Popen(["sh", "-c", "sleep 300; true", name])
"""
    done = _run_patched(launcher, IT_CANNOT_BE_SIGNALLED, script, "-n", "1")
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
    script = """
if rank == 0:
    os.execlp("sh", "sh", "-c", "sleep 300; true", "protected")
until(lambda: b"protected" in open(f"/proc/{board()[0][0]}/cmdline", "rb").read())
sys.exit(3)
"""
    done = _run_patched(launcher, IT_CANNOT_BE_SIGNALLED, script, "-n", "2", "--grace", "0.1")
    assert done.returncode == 3, done.stderr
    assert re.search(r"leaving without rank 0, pid \d+ \(sh, state \w\)", done.stderr)
    assert "rank 1 failed first: exit code 3" in done.stderr
    for pid in launcher.alive():  # the shell dies with the supervisor, its child is nobody's
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not launcher.alive())


def test_nothing_is_computed_while_the_console_takes_nothing(launcher: Launcher) -> None:
    """Something was left behind, and has ended since: nothing is due any more."""
    script = """
outlives = "while kill -0 $PPID; do sleep 0.05; done; sleep 0.1"
subprocess.Popen(["sh", "-c", outlives], stderr=subprocess.DEVNULL)
os.write(1, b"x" * (1 << 20))
"""
    process = launcher.start(script, "-n", "1")
    below = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(below.read_text)
    supervisor = int(below.read_text())
    wait_until(lambda: len(launcher.alive()) == 2)  # front and supervisor
    time.sleep(0.7)  # until what was due would be
    before = _cpu_s(supervisor)
    time.sleep(1.0)
    used = _cpu_s(supervisor) - before
    process.communicate(timeout=BOUND_S)
    assert used < 0.1 and process.returncode == 0


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda each: each.name)
def test_a_stopped_supervisor_ends_the_job_all_the_same(launcher: Launcher, number: signal.Signals) -> None:
    script = f"signal.signal({int(number)}, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script += 'print(os.getppid(), flush=True)\nuntil(lambda: os.path.exists("never"))'
    with launcher.start(script, "-n", "1") as process:
        supervisor = int(read_lines(process, 1)[0].split()[-1])
        os.kill(supervisor, signal.SIGSTOP)
        wait_until(lambda: "State:\tT" in Path(f"/proc/{supervisor}/status").read_text())
        process.send_signal(number)
        assert process.wait(BOUND_S) == 128 + number
