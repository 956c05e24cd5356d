"""A part of the fuzzer of arguments; all of it with the long tests, or by command, see arguments.py."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from effort import HANG_S, LONG, cases
from loops import each
from python_runs import ran

PROGRAM = Path(__file__).with_name("arguments.py")
LIMIT_S = 6000 if LONG else HANG_S
RUNS = cases(
    [
        ("--seed", "1", "--values", "numbers", "--cases", "1500"),
        ("--seed", "2", "--only", "Store", "--values", "numbers", "--cases", "1500"),
        ("--seed", "1", "--cases", "1500"),
    ],
    long=[("--seed", str(seed)) for seed in range(1, 4)],
)


@pytest.fixture(scope="module")
def ends() -> dict[tuple[str, ...], subprocess.CompletedProcess[str]]:
    """All runs at once: they wait most of the time."""
    with ThreadPoolExecutor(len(RUNS)) as pool:
        return dict(zip(RUNS, pool.map(lambda run: ran(PROGRAM, *run, limit_s=LIMIT_S), RUNS), strict=True))


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("arguments", RUNS, ids=" ".join)
def test_no_argument_crashes_or_raises_something_foreign(ends: Any, arguments: tuple[str, ...]) -> None:
    done = ends[arguments]
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-2000:]}"


@each("rank", [-1, 1, 2, 63, 10**6, 2**31, 2**63, 2**64, -(2**70)])
def test_last_seen_of_a_rank_outside_the_group(rank: int) -> None:
    def work(group: un.Group) -> None:
        for function in (group.last_seen, group.host_of):
            with pytest.raises(ValueError, match="is not in group"):
                function(rank)
        with pytest.raises(ValueError, match="is not in group"):
            group.send(np.ones(1), rank)
        group.all_reduce(x := np.ones(1))
        assert x[0] == 1

    ranks.threads(1, work)


def test_reproducible_takes_a_flag_only() -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(TypeError, match="expected True or False"):
            group.reproducible = "no"  # type: ignore[assignment]
        group.all_reduce(np.ones(1))

    ranks.threads(1, work)
