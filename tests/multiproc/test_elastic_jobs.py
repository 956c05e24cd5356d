"""`unisono run --elastic`: jobs that go on without lost ranks, replace them, take newcomers in, and end."""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from effort import HANG_S, cases, judge_time
from launching import Launcher, read_lines, wait_until

PROGRAMS = Path(__file__).resolve().parent / "programs"
GOES_ON = PROGRAMS / "goes_on.py"


def done(output: str) -> list[str]:
    """What the ranks that ended well have said at their end."""
    return re.findall(r"done \d+ size \d+", output)


@pytest.mark.parametrize("whom", cases(["0"], long=["1"]))
def test_the_others_go_on_and_the_job_succeeds(launcher: Launcher, whom: str) -> None:
    found = launcher.run(GOES_ON, "--elastic", "2:3", args=("60", "kill", whom, "20"))
    assert found.returncode == 0, found.stderr
    assert done(found.stdout) == ["done 60 size 2"] * 2, found.stdout
    assert re.search(
        rf"rank {whom} \(host .*, pid \d+\) is out: ended by SIGKILL; 2 ranks go on", found.stderr
    )
    assert "failed" not in found.stderr


def test_a_rank_that_raises_is_shown_and_the_others_go_on(launcher: Launcher) -> None:
    found = launcher.run(GOES_ON, "--elastic", "1:3", args=("60", "raise", "2", "20"))
    assert found.returncode == 0, found.stderr
    assert done(found.stdout) == ["done 60 size 2"] * 2
    assert "[rank 2] ValueError: bad loss" in found.stderr
    assert "is out: left because of ValueError: bad loss; 2 ranks go on" in found.stderr


@pytest.mark.parametrize(
    ("what", "whom"), cases([("stop", "1"), ("raise", "2"), ("kill", "0,2")], long=[("kill", "0")])
)
def test_lost_ranks_are_replaced(launcher: Launcher, what: str, whom: str) -> None:
    stop = launcher.folder / "stop"
    launcher.environ["STOP"] = str(stop)
    words = ("1000000", what, whom, "20")
    running = launcher.start(GOES_ON, "--elastic", "1:3", "--respawn", "2", args=words)
    said = until_said(running, r"generation [2-9] size 3")
    stop.touch()
    out, errors = running.communicate(timeout=HANG_S)
    assert running.returncode == 0, said + out + errors
    assert done(out) == ["done 1000000 size 3"] * 3, said + out + errors


def until_said(running: subprocess.Popen[str], text: str) -> str:
    """Read standard output until a line fits."""
    assert running.stdout is not None
    said = ""
    for line in running.stdout:
        said += line
        if re.search(text, line):
            return said
    raise AssertionError(said)


def test_fewer_than_the_minimum_is_an_end_with_the_exit_code_of_the_loss(launcher: Launcher) -> None:
    began = time.monotonic()
    found = launcher.run(GOES_ON, "--elastic", "3:4", args=("1000", "kill", "1,2", "20"))
    assert found.returncode == 137, found.stderr
    assert "2 left, and the minimum is 3" in found.stderr or "minimum is 3" in found.stderr
    assert "2 ranks are left, and the minimum is 3" in found.stderr
    judge_time(time.monotonic() - began, 20)


def test_a_rank_that_dies_at_start_does_not_spin(launcher: Launcher) -> None:
    stop = launcher.folder / "stop"
    launcher.environ["STOP"] = str(stop)
    words = ("1000000", "vain", "1", "20")
    running = launcher.start(GOES_ON, "--elastic", "1:3", "--respawn", "2", args=words)
    assert running.stderr is not None
    errors = ""
    while "rank 1 is not replaced again: 2 replacements did not stay" not in errors:
        line = running.stderr.readline()
        assert line, errors
        errors += line
    stop.touch()
    out, _ = running.communicate(timeout=HANG_S)
    assert running.returncode == 0, errors
    assert done(out) == ["done 1000000 size 2"] * 2


def test_a_failure_before_there_is_a_group_ends_the_job(launcher: Launcher) -> None:
    script = "import unisono as un; rank == 1 and sys.exit(7); list(un.elastic())"
    began = time.monotonic()
    found = launcher.run(script, "--elastic", "1:3", "--respawn", "5")
    assert found.returncode == 7, found.stderr
    assert "rank 1 failed first: exit code 7" in found.stderr
    judge_time(time.monotonic() - began, 20)


def test_a_program_that_does_not_go_on_ends_as_ever(launcher: Launcher) -> None:
    program = PROGRAMS / "does_not_go_on.py"
    found = launcher.run(program, "--elastic", "1:3", "--respawn", "5", args=("1",))
    assert found.returncode == 137, found.stderr
    assert "rank 1 failed first: SIGKILL" in found.stderr


def test_programs_without_a_group_end_with_0(launcher: Launcher) -> None:
    assert launcher.run("print('x')", "--elastic", "1:2").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_an_elastic_job(launcher: Launcher, number: int) -> None:
    running = launcher.start(GOES_ON, "--elastic", "1:3", "--respawn", "3", args=("100000", "kill", "1", "5"))
    read_lines(running, 5)
    running.send_signal(number)
    running.communicate(timeout=HANG_S)
    assert running.returncode == 128 + number


def test_the_launcher_is_killed(launcher: Launcher) -> None:
    running = launcher.start(GOES_ON, "--elastic", "1:3", args=("100000", "nothing", "1", "5"))
    read_lines(running, 3)
    running.kill()
    running.communicate(timeout=HANG_S)
    wait_until(lambda: not launcher.alive())


def address_of(running: subprocess.Popen[str]) -> str:
    """Where newcomers may come, as the launcher says."""
    assert running.stderr is not None
    for line in running.stderr:
        if found := re.search(r"unisono run --join (\S+)", line):
            return found[1]
    raise AssertionError("the launcher named no address")


def token_of(launcher: Launcher, digits: str = "ab") -> str:
    path = launcher.folder / f"token-{digits}"
    path.write_text(digits * 32)
    path.chmod(0o600)
    return str(path)


def test_another_launcher_joins_and_outlives_the_first(launcher: Launcher) -> None:
    token = token_of(launcher)
    words = ("1000000", "nothing", "9", "0")
    stop = launcher.folder / "stop"
    launcher.environ["STOP"] = str(stop)
    first = launcher.start(GOES_ON, "--elastic", "1:4", "-n", "2", "--token-file", token, args=words)
    address = address_of(first)
    second = launcher.start(GOES_ON, "--join", address, "-n", "2", "--token-file", token, args=words)
    until_said(second, "size 4")
    first.kill()
    first.communicate(timeout=HANG_S)
    until_said(second, "size 2")
    stop.touch()
    out, errors = second.communicate(timeout=HANG_S)
    assert second.returncode == 0, errors
    assert done(out) == ["done 1000000 size 2"] * 2
    assert errors.count("is out:") == 2, errors


def test_a_newcomer_with_another_token_is_told(launcher: Launcher) -> None:
    words = ("1000000", "nothing", "9", "0")
    stop = launcher.folder / "stop"
    launcher.environ["STOP"] = str(stop)
    first = launcher.start(
        GOES_ON, "--elastic", "1:4", "-n", "2", "--token-file", token_of(launcher), args=words
    )
    address = address_of(first)
    found = launcher.run(GOES_ON, "--join", address, "--token-file", token_of(launcher, "cd"), args=words)
    assert found.returncode == 1
    assert "AuthenticationError" in found.stderr
    stop.touch()
    first.communicate(timeout=HANG_S)
    assert first.returncode == 0


def test_a_subgroup_that_shrinks_is_no_loss_of_the_job(launcher: Launcher) -> None:
    found = launcher.run(PROGRAMS / "shrinks_a_part.py", "--elastic", "3:3")
    assert found.returncode == 0, found.stderr
    assert done(found.stdout) == ["done 0 size 3"] * 3
    assert "is out" not in found.stderr
