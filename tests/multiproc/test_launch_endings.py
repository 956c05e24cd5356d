"""`unisono run` with real processes: failures, signals, and that nothing is ever left behind."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from effort import HANG_S, LONG, cases, judge_time
from launching import Launcher, read_lines, wait_until
from unisono.commands.launch.process import AFTER_SIGNAL_S

PROGRAMS = Path(__file__).resolve().parent / "programs"


# --- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "code"),
    cases([("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGUSR1)", 138)], long=[("sys.exit(0)", 0)]),
)
def test_exit_code_is_kept(launcher: Launcher, last: str, code: int) -> None:
    assert launcher.run(last, "-n", "2", "--grace", "0").returncode == code


def test_a_rank_that_ends_right_behind_the_look_is_noticed() -> None:
    program = str(Path(__file__).with_name("launcher_program.py"))
    words = ["the_next_ends_behind_the_look", "run", "-n", "2", str(PROGRAMS / "sleeps_by_rank.py")]
    subprocess.run([sys.executable, program, *words], check=True, timeout=HANG_S)


def test_a_launcher_that_may_not_adopt_orphans_says_so_once() -> None:
    program = str(Path(__file__).with_name("launcher_program.py"))
    words = ["no_process_adopts_orphans", "run", "-n", "2", str(PROGRAMS / "sleeps_by_rank.py")]
    ended = subprocess.run(
        [sys.executable, program, *words], check=True, timeout=HANG_S, capture_output=True, text=True
    )
    assert ended.stderr.count("refuses PR_SET_CHILD_SUBREAPER") == 1, ended.stderr


def test_first_failure_comes_first_and_the_others_in_one_line(launcher: Launcher) -> None:
    for grace in ("1.5", "10"):  # a busy machine may not let two ranks end within the first
        args = (str(_folder(launcher, f"ready{grace}")),)
        done = launcher.run(PROGRAMS / "fails_first.py", "-n", "4", "--grace", grace, args=args)
        assert done.returncode == 1
        if "ranks 0-1 failed because" in done.stderr:
            break
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[rank")][1:]
    begins = next(number for number, line in enumerate(lines) if line.startswith("unisono run:"))
    block, summary = lines[:begins], lines[begins:]
    assert block[0] == "ranks 0-1:" and block[1] == "  Traceback (most recent call last):"
    assert "\n".join(block).count("PeerLost: barrier failed: rank 2") == 1
    assert re.fullmatch(r"unisono run: rank 2 failed first: exit code 1 \(pid \d+\)", summary[0])
    assert summary[1] == "  ValueError: the cause"  # the whole traceback is above, behind [rank 2]
    assert "[rank 2] KeyError: 'inner'" in done.stderr
    assert len(summary) == 3
    assert summary[-1] == (
        "unisono run: then ranks 0-1 failed because rank 2 was gone (exit code 1); "
        "rank 3 was ended by the launcher"
    )


def test_a_peer_that_ends_sooner_than_the_cause_is_not_the_first_failure(launcher: Launcher) -> None:
    done = launcher.run(PROGRAMS / "fails_before_its_cause.py", "-n", "2", "--grace", "30")
    assert "rank 1 failed first: exit code 1" in done.stderr and "\n  bad input\n" in done.stderr


def test_rank_that_ignores_sigterm_is_killed(launcher: Launcher) -> None:
    args = (str(_folder(launcher, "ready")),)
    done = launcher.run(PROGRAMS / "ignores_its_end.py", "-n", "2", "--grace", "0.1", args=args)
    assert done.returncode == 5 and "rank 0 was ended by the launcher" in done.stderr


def _folder(launcher: Launcher, name: str) -> Path:
    path = launcher.folder / name
    path.mkdir()
    return path


# --- the user ends it --------------------------------------------------------------------------------


def _in_terminal(command: list[str], environ: dict[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start `command` as the foreground job of a new terminal; return it and our end.

    Not by `pty.fork`: Python 3.15 warns of a fork in a process with threads.
    """
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", *command], env=environ, stdin=inside, stdout=inside, stderr=inside
    )
    os.close(inside)
    return process, terminal


def _read_terminal(terminal: int, until: Callable[[bytes], bool] = lambda seen: False) -> bytes:
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while not until(seen):
            data = os.read(terminal, 65536)
            if not data:
                break
            seen += data
    return seen


def test_ctrl_c_of_a_terminal_arrives_exactly_once(launcher: Launcher) -> None:
    for _ in range(3):  # on a busy machine a rank may not get to its last line before it is ended
        environ = {**launcher.environ, "TERM": "xterm"}
        command = launcher.command(PROGRAMS / "counts_interrupts.py", "-n", "3")
        process, terminal = _in_terminal(command, environ)
        _read_terminal(terminal, lambda seen: seen.count(b"ready") == 3)
        os.write(terminal, b"\x03")
        seen = _read_terminal(terminal)
        assert process.wait() == 130
        os.close(terminal)
        assert b"\x1b[" in seen  # colours on a terminal
        assert seen.count(b"interrupts") == seen.count(b"interrupts 1"), seen
        if seen.count(b"interrupts") == 3:
            return
    assert not LONG, f"not all ranks told of their Ctrl-C, three times: {seen!r}"


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_those_who_ignore_it(launcher: Launcher, times: int) -> None:
    process = launcher.start(PROGRAMS / "ignores_signals.py", "-n", "2", args=(str(int(signal.SIGINT)),))
    read_lines(process, 2)
    began = time.monotonic()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.4)  # sooner, it would count as the same Ctrl-C, sent by terminal and wrapper
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert "interrupted" in errors and "failed first" not in errors
    judge_time(time.monotonic() - began, 3.0 if times == 1 else 2.0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_termination_is_passed_on(launcher: Launcher, number: signal.Signals, code: int) -> None:
    for _ in range(3):  # a busy machine is late now and then, not always
        process = launcher.start(
            PROGRAMS / "says_that_it_is_told.py", "-n", "2", args=(str(int(signal.SIGTERM)),)
        )
        read_lines(process, 2)
        began = time.monotonic()
        process.send_signal(number)
        output, errors = process.communicate(timeout=HANG_S)
        took_s = time.monotonic() - began
        assert process.returncode == code
        if took_s < AFTER_SIGNAL_S:
            assert output.count("told") == 2, (output, errors)
            return
    judge_time(took_s, AFTER_SIGNAL_S)  # of the last of three: those ranks were killed


def test_a_reader_that_leaves_ends_the_job(launcher: Launcher) -> None:
    process = launcher.start("until(lambda: print('x' * 1000))", "-n", "2")
    assert process.stdout is not None and process.stderr is not None
    read_lines(process, 1)
    process.stdout.close()
    assert process.wait(timeout=HANG_S) == 141
    process.stderr.close()


def test_a_reader_that_sleeps_does_not_hold_up_the_end(launcher: Launcher) -> None:
    process = launcher.start("print('ready'); until(lambda: print('x' * 100000))", "-n", "2")
    read_lines(process, 1)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=HANG_S) == 143
    process.communicate()


# --- nothing is left -----------------------------------------------------------------------------------

LEAVES_CHILDREN = PROGRAMS / "leaves_children.py"


@pytest.mark.needs("orphans")
@pytest.mark.parametrize("victim", ["front", "supervisor"])
def test_a_killed_launcher_leaves_nothing(launcher: Launcher, victim: str) -> None:
    process = launcher.start(LEAVES_CHILDREN, "-n", "2", args=("sleep",))
    supervisor = int(read_lines(process, 2)[0].split()[-1])
    assert supervisor != process.pid
    os.kill(process.pid if victim == "front" else supervisor, signal.SIGKILL)
    process.communicate(timeout=HANG_S)
    wait_until(lambda: not launcher.alive())
    assert process.returncode == (-9 if victim == "front" else 137)


@pytest.mark.needs("orphans")
@pytest.mark.parametrize(("end", "code"), [("exit", 0), ("kill", 137)])
def test_what_ranks_leave_behind_is_ended(launcher: Launcher, end: str, code: int) -> None:
    done = launcher.run(LEAVES_CHILDREN, "-n", "2", "--grace", "30", args=(end,))
    assert done.returncode == code
    assert "left behind by the ranks" in done.stderr


@pytest.mark.needs("orphans")
def test_shared_memory_is_removed_however_slow_the_machine_is(launcher: Launcher) -> None:
    places = [str(PROGRAMS / "slow_tracker"), launcher.environ["PYTHONPATH"]]
    launcher.environ["PYTHONPATH"] = os.pathsep.join(places)
    process = launcher.start(LEAVES_CHILDREN, "-n", "2", args=("sleep",))
    read_lines(process, 2)
    assert len(launcher.shared_memory()) == 2
    process.kill()
    process.communicate(timeout=HANG_S)
    wait_until(lambda: not launcher.shared_memory())


def test_nodes_that_were_stopped_for_a_while_go_on(launcher: Launcher, port: int) -> None:
    """As a virtual machine that is moved: no answer then says nothing of the other node."""
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    where += ["--token-file", str(launcher.folder / "token"), "-n", "1", "--node-rank"]
    script, go = PROGRAMS / "waits_for_a_file.py", launcher.folder / "go"
    nodes = [launcher.start(script, *where, "0", args=(str(go),))]
    wait_until((launcher.folder / "token").exists)
    nodes.append(launcher.start(script, *where, "1", args=(str(go),)))
    for node in nodes:
        read_lines(node, 1)
    time.sleep(1.5)  # until both watch
    for node in nodes:
        node.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    for node in reversed(nodes):
        node.send_signal(signal.SIGCONT)
        time.sleep(0.5)
    time.sleep(1.5)
    go.touch()
    ends = [(*node.communicate(timeout=HANG_S), node.returncode) for node in nodes]
    assert [code for *_, code in ends] == [0, 0], ends


def of_two_nodes(launcher: Launcher, port: int, script: Path, *args: str) -> list[subprocess.Popen[str]]:
    """Both nodes, with TLS between them."""
    launcher.environ["UNISONO_RANKS_PER_HOST"] = "1"
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--tls"]
    where += ["--token-file", str(launcher.folder / "token"), "-n", "1", "--node-rank"]
    nodes = [launcher.start(script, *where, "0", args=args)]
    wait_until((launcher.folder / "token").exists)
    return [*nodes, launcher.start(script, *where, "1", args=args)]


def rank_0_ends_before_it_is_received(launcher: Launcher, port: int, go: Path) -> list[subprocess.Popen[str]]:
    """Both nodes, while a relay delivers what rank 0 sent: rank 1 receives it when `go` is there."""
    nodes = of_two_nodes(launcher, port, PROGRAMS / "sends_and_ends.py", str(go))
    assert nodes[0].stderr is not None
    said = []
    for line in nodes[0].stderr:
        said.append(line)
        if "TLS connections" in line:
            return nodes
    nodes[1].kill()
    for node in nodes:
        node.communicate(timeout=HANG_S)
    raise AssertionError(f"node 0 ended, and said: {''.join(said)}")


@pytest.mark.needs("orphans")
def test_what_a_rank_sent_over_tls_arrives_after_its_end(launcher: Launcher, port: int) -> None:
    go = launcher.folder / "go"
    nodes = rank_0_ends_before_it_is_received(launcher, port, go)
    go.touch()
    ends = [(*node.communicate(timeout=HANG_S), node.returncode) for node in nodes]
    assert [code for *_, code in ends] == [0, 0], ends
    assert "received all" in ends[1][0]
    assert "left behind" not in ends[0][1]


@pytest.mark.needs("orphans")
def test_interrupted_while_tls_delivers(launcher: Launcher, port: int) -> None:
    nodes = rank_0_ends_before_it_is_received(launcher, port, launcher.folder / "never")
    began = time.monotonic()
    nodes[0].send_signal(signal.SIGINT)
    for node in nodes:
        node.communicate(timeout=HANG_S)
    judge_time(time.monotonic() - began, 10)
    assert nodes[0].returncode == 130


@pytest.mark.needs("orphans")
def test_interrupted_while_strays_live(launcher: Launcher) -> None:
    process = launcher.start(LEAVES_CHILDREN, "-n", "2", args=("sleep",))
    read_lines(process, 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 130


def test_ctrl_z_stops_the_ranks_and_they_go_on(launcher: Launcher) -> None:
    never = str(launcher.folder / "never")
    process = launcher.start(PROGRAMS / "waits_for_a_file.py", "-n", "2", args=(never,))
    pids = [process.pid, *(int(line.split()[-1]) for line in read_lines(process, 2))]

    def states() -> set[str]:
        return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}

    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: states() == {"T"})
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: "T" not in states())
    process.terminate()
    process.communicate(timeout=HANG_S)
    assert process.returncode == 143


def test_user_signals_reach_the_ranks(launcher: Launcher) -> None:
    told = PROGRAMS / "says_that_it_is_told.py"
    process = launcher.start(told, "-n", "2", args=(str(int(signal.SIGUSR1)),))
    read_lines(process, 2)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 0


def test_a_progress_bar_is_seen_before_its_line_ends(launcher: Launcher) -> None:
    command = launcher.command(PROGRAMS / "shows_progress.py", "-n", "2")
    process, terminal = _in_terminal(command, launcher.environ)
    seen = _read_terminal(terminal, lambda seen: seen.count(b"10%") == 2)
    process.terminate()
    _read_terminal(terminal)
    process.wait()
    os.close(terminal)
    assert b"[rank 0]" in seen and b"[rank 1]" in seen
