"""`unisono run --token-file` on nodes that start in any order, and a file that is written meanwhile."""

import os
import signal
import subprocess

import pytest

from effort import HANG_S
from launching import Launcher, wait_until
from ports import reserved


def node(launcher: Launcher, number: int, port: int) -> subprocess.Popen[str]:
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "-n", "1"]
    where += ["--token-file", str(launcher.folder / "token"), "--node-rank", str(number)]
    return launcher.start("print('ran', rank)", *where)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_either_node_may_start_first(launcher: Launcher, order: tuple[int, int]) -> None:
    path = launcher.folder / "token"
    with reserved() as port:
        nodes = {order[0]: node(launcher, order[0], port)}
        if order[0] == 1:
            assert "has no whole token yet, waiting up to 300 s" in first_line(nodes[1])
        else:
            wait_until(path.exists)
        nodes[order[1]] = node(launcher, order[1], port)
        ends = {number: (*one.communicate(timeout=HANG_S), one.returncode) for number, one in nodes.items()}
    assert [ends[number][2] for number in (0, 1)] == [0, 0], ends
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_beginning_of_a_token_is_not_taken(launcher: Launcher) -> None:
    path = launcher.folder / "token"
    path.touch(0o600)
    with reserved() as port:
        late = node(launcher, 1, port)
        assert "waiting" in first_line(late)
        path.write_text("5" * 40)
        with pytest.raises(subprocess.TimeoutExpired):
            late.wait(0.3)
        path.write_text("5" * 64 + "\n")
        nodes = [node(launcher, 0, port), late]
        ends = [(*one.communicate(timeout=HANG_S), one.returncode) for one in nodes]
    assert [code for *_, code in ends] == [0, 0], ends


def test_what_will_never_be_a_token_is_refused_at_once(launcher: Launcher) -> None:
    path = launcher.folder / "token"
    path.touch(0o600)
    path.write_text("no token at all")
    wrong = node(launcher, 1, 1)
    said, status = wrong.communicate(timeout=HANG_S)[1], wrong.returncode
    assert status == 2 and "64 hexadecimal digits" in said and "waiting" not in said, said
    path.write_text("")
    path.chmod(0o644)
    open_to_all = node(launcher, 1, 1)
    assert "its mode is 0644" in open_to_all.communicate(timeout=HANG_S)[1]


def test_the_wait_ends_with_ctrl_c(launcher: Launcher) -> None:
    waits = node(launcher, 1, 1)
    assert "waiting" in first_line(waits)
    os.kill(waits.pid, signal.SIGINT)
    assert waits.communicate(timeout=HANG_S)[1] == "" and waits.returncode == 130
