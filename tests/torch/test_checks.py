"""Everything in checks/ on two ranks, on three by `make test-long`: each world size is one set of processes.

PyTorch's own tests run on three, see test_pytorch_suite.py.

A check that fails, or ends its rank, fails alone. A set that did not come to its end leaves the rest to a new
one.
"""

import functools
import json
import tempfile
import time
from pathlib import Path

import pytest

import suite
from effort import HANG_S, cases

CALL_S = 20  # with less time left, no other set of checks is begun
AFTER_A_DEATH_S = 10  # for the survivors to tell what they saw
LIVES_ON = ["passes", "fails_as_pytest_does", "passes_then", "raises_on_one_rank", "skips", "passes_still"]
SKIPPED = "skipped: "  # as worker.py writes it
DIES = ["ends_its_process", "passes_after_a_death", "is_killed", "passes_at_last"]


@functools.cache
def results(forks: suite.Forks, size: int) -> dict[str, str]:
    return run_all(forks, size, "checks", suite.checks("checks"), HANG_S)


def run_all(
    forks: suite.Forks,
    size: int,
    package: str,
    checks: list[str],
    limit_s: float,
    grace_s: float = AFTER_A_DEATH_S,
) -> dict[str, str]:
    """Run checks on `size` ranks; what went wrong in each (empty: it passed)."""
    deadline = time.monotonic() + limit_s
    found: dict[str, str] = {}
    while left := [check for check in checks if check not in found]:
        remaining_s = deadline - time.monotonic()
        if remaining_s < CALL_S:
            return dict.fromkeys(checks, f"not run: {limit_s} s were over") | found
        found |= run(forks, size, package, left, remaining_s, grace_s)
    return found


def run(
    forks: suite.Forks, size: int, package: str, checks: list[str], limit_s: float, grace_s: float
) -> dict[str, str]:
    """Run checks in one set of processes, up to the first that does not end on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        job = ("worker", size, [package, *checks])
        printed = forks.run(Path(folder), {"ranks": job}, limit_s, grace_s)["ranks"]
        written = [outcomes(Path(folder, "ranks", f"result{rank}")) for rank in range(size)]
    ended = [check for check in checks if all(check in of_rank for of_rank in written)]
    found = {check: _text(written, check) for check in ended}
    for check in checks[len(ended) :][:1]:
        found[check] = "\n".join(["not all ranks came to its end", *printed, _text(written, check)])
    return found


def outcomes(path: Path) -> dict[str, str]:
    """What one rank wrote. A rank that was killed may have left the last line unfinished."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return dict(json.loads(line) for line in lines if line.endswith("\n"))


def _text(written: list[dict[str, str]], check: str) -> str:
    tracebacks = [of_rank.get(check, "") for of_rank in written]
    if all(text.startswith(SKIPPED) for text in tracebacks):
        return tracebacks[0]
    return "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(tracebacks) if text)


@pytest.mark.parametrize("module", dict.fromkeys(check.partition(".")[0] for check in suite.checks("checks")))
@pytest.mark.parametrize("size", cases([2], long=[3]))
def test_checks(forks: suite.Forks, size: int, module: str, subtests: pytest.Subtests, record_property):
    for check, text in results(forks, size).items():
        if check.partition(".")[0] != module:
            continue
        ended = "skipped" if text.startswith(SKIPPED) else "failed" if text else "passed"
        record_property(check.partition(".")[2], ended)  # for recording/table.py
        if text:
            with subtests.test(check=check):
                if ended == "skipped":
                    pytest.skip(text.removeprefix(SKIPPED))
                pytest.fail(text, pytrace=False)


def test_a_check_that_fails_fails_alone(forks: suite.Forks):
    checks = [f"lives_on.check_{name}" for name in LIVES_ON]
    found = run_all(forks, 2, "failing", checks, HANG_S)
    words = {
        "fails_as_pytest_does": "DID NOT RAISE",
        "raises_on_one_rank": "of rank 1 only",
        "skips": "skipped: ",
    }
    for check, text in found.items():
        word = words.get(check.partition("check_")[2], "")
        assert (word in text) if word else (text == ""), f"{check}: {text}"
    assert list(found) == checks


def test_a_check_that_ends_a_rank_fails_alone(forks: suite.Forks):
    checks = [f"ends_its_rank.check_{name}" for name in DIES]
    found = run_all(forks, 2, "failing", checks, HANG_S, grace_s=2)
    failed = {check: text for check, text in found.items() if text}
    assert list(failed) == ["ends_its_rank.check_ends_its_process", "ends_its_rank.check_is_killed"]
    assert "(ended with 7)" in failed["ends_its_rank.check_ends_its_process"]
    assert "(ended with -9)" in failed["ends_its_rank.check_is_killed"]
    assert "PeerLost" in failed["ends_its_rank.check_is_killed"]


def test_time_that_is_over_is_told(forks: suite.Forks):
    found = run_all(forks, 2, "failing", ["lives_on.check_passes"], CALL_S - 1)
    assert found == {"lives_on.check_passes": "not run: 19 s were over"}
