"""One-sided communication between processes: a sequential model, targets that do nothing, ranks that die."""

from collections import Counter
from pathlib import Path

import pytest

from effort import cases, crossed
from python_runs import PATH, ran

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "programs" / "window_ranks.py"


def outputs(mode: str, size: int, code: int = 0, **environment: str) -> list[str]:
    """What the ranks print, without the launcher's prefixes."""
    ended = ran("-m", "unisono", "run", "-n", size, PROGRAM, mode, **PATH, **environment)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return [line.partition("] ")[2] for line in ended.stdout.splitlines() if line.startswith("[rank")]


@pytest.mark.parametrize("spread", cases(["one host", "twos"], long=["apart"]), indirect=True)
def test_processes_give_what_the_model_gives(spread: str) -> None:
    assert outputs("model", 3) == ["equal"] * 3


def test_processes_without_access_to_each_other_give_the_same() -> None:
    assert outputs("model", 2, UNISONO_ZERO_COPY="0") == ["equal"] * 2


@pytest.mark.parametrize("per_host", ["0", "1"])
def test_a_target_that_runs_no_python_is_used_all_the_same(per_host: str) -> None:
    found = Counter(outputs("asleep", 3, UNISONO_RANKS_PER_HOST=per_host))
    assert found == {"served": 2, "[100, 100]": 1}


def test_the_end_of_a_group_ends_the_wait_of_its_thread() -> None:
    assert sorted(outputs("closed", 2)) == ["GroupClosed at once", "PeerLost of rank 0"]


def test_ranks_that_end_after_their_last_window_disturb_no_other() -> None:
    for _ in range(2):
        assert outputs("ended", 6) == ["ended"] * 6


@pytest.mark.parametrize(("mode", "per_host"), crossed(["killed", "target"], ["0", "1"]))
def test_a_dead_rank_is_named_and_nobody_waits_for_its_lock(mode: str, per_host: str) -> None:
    found = outputs(mode, 3, 137, UNISONO_RANKS_PER_HOST=per_host)
    assert set(found) == {"PeerLost of rank 0"}


@pytest.mark.parametrize("per_host", ["0", "1"])
def test_a_forked_child_leaves_the_window_to_its_parent(per_host: str) -> None:
    assert outputs("forked", 2, UNISONO_RANKS_PER_HOST=per_host) == ["7"] * 2
