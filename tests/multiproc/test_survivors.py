"""Processes that lose ranks and go on: killed, stopped, slow, excluded, during shrink, two at once."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from effort import HANG_S, cases, crossed
from loops import SPREADS
from python_runs import PATH, ran

HERE = Path(__file__).resolve().parent
PROGRAM = str(HERE / "survivor_program.py")


def run(size: int, what: str, whom: tuple[int, ...], seed: int = 1) -> list[dict[str, Any]]:
    """What each rank has reported, together; a stopped rank continues when the others have ended."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "WORLD_SIZE": str(size), "MEETING": f"file://{folder}/meeting"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        running = [
            subprocess.Popen(
                [sys.executable, PROGRAM, what, ",".join(map(str, whom)), str(seed)],
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        return _collect(running, whom if what == "stop" else ())


def _collect(running: list[subprocess.Popen[str]], stopped: tuple[int, ...]) -> list[dict[str, Any]]:
    end = time.monotonic() + HANG_S
    found: list[dict[str, Any]] = [{} for _ in running]
    try:
        for rank in sorted(range(len(running)), key=lambda rank: rank in stopped):
            if rank in stopped:
                running[rank].send_signal(signal.SIGCONT)
            output = running[rank].communicate(timeout=max(1.0, end - time.monotonic()))[0]
            for line in output.splitlines():
                if line.startswith("{"):
                    found[rank].update(json.loads(line))
            found[rank].update(code=running[rank].returncode, output=output)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return found


def check(found: list[dict[str, Any]], whom: tuple[int, ...], why: str) -> None:
    """All others are in one group, with the same members, and know who left and why."""
    rest = [rank for rank in range(len(found)) if rank not in whom]
    for number, rank in enumerate(rest):
        mine = found[rank]
        assert mine["code"] == 0, mine["output"]
        assert (mine["size"], mine["new_rank"]) == (len(rest), number), mine["output"]
        assert mine["previous"] == rest
        assert sorted(map(int, mine["left"])) == sorted(whom)
        assert all(each.startswith(why) for each in mine["left"].values()), mine["left"]


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize(
    ("size", "whom", "spread"),
    cases(
        [(2, (1,), "one host"), (6, (0, 1, 4), "apart"), (6, (0, 1, 4), "twos")],
        long=[(2, (1,), "apart"), (6, (0, 1, 4), "one host")],
    ),
    indirect=["spread"],
)
def test_the_others_go_on_when_ranks_are_killed(size: int, whom: tuple[int, ...]) -> None:
    found = run(size, "kill", whom, seed=size)
    check(found, whom, "")
    assert all(found[rank]["code"] == -signal.SIGKILL for rank in whom)


@pytest.mark.parametrize(("size", "whom"), [(4, (0, 2)), (2, (0,))])
def test_a_stopped_rank_is_out_and_learns_it_when_it_continues(size: int, whom: tuple[int, ...]) -> None:
    found = run(size, "stop", whom)
    check(found, whom, "stopped")
    for rank in whom:
        assert found[rank].get("evicted") == "stopped", found[rank]["output"]
        assert "was evicted: stopped" in found[rank]["text"]


def test_the_others_know_which_exception_has_ended_a_rank() -> None:
    check(run(4, "raise", (1,)), (1,), "left because of ValueError: bad loss")


def test_a_rank_that_misses_its_deadline_is_out_and_learns_it() -> None:
    found = run(4, "slow", (2,))
    check(found, (2,), "late")
    assert found[2]["evicted"] == "late", found[2]["output"]


@pytest.mark.parametrize("whom", [(3,), (0, 2)])
def test_ranks_are_excluded_by_will(whom: tuple[int, ...]) -> None:
    found = run(4, "exclude", whom)
    check(found, whom, "excluded")
    for rank in whom:
        assert "excluded" in found[rank]["evicted"], found[rank]["output"]


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize(("seed", "spread"), crossed([0, 4], [*SPREADS]), indirect=["spread"])
def test_ranks_die_while_the_others_shrink(seed: int) -> None:
    size, whom = (4, (seed % 4,)) if seed < 3 else (6, (seed % 6, (seed + 2) % 6))
    found = run(size, "during", whom, seed)
    rest = [rank for rank in range(size) if rank not in whom]
    for rank in rest:
        assert found[rank]["code"] == 0, found[rank]["output"]
        assert found[rank]["size"] == len(rest), found[rank]["output"]


def test_a_crowd_goes_on_without_ranks_that_are_killed(tmp_path: Path) -> None:
    """More ranks than a rank watches, and more than have memory for messages between all pairs."""
    program = HERE / "programs" / "crowd_that_loses_ranks.py"
    victims = (0, 17, 18, 40)
    done = ran(program, "70", *victims, FOLDER=tmp_path, **PATH)
    expected = [f"{rank} 66 [0, 17, 18, 40] True" for rank in range(66)]
    assert sorted(done.stdout.splitlines()) == sorted(expected), done.stderr[-2000:]
