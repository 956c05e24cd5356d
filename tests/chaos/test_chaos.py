"""The chaos kit in its short form; `faults.py` and `churn.py` say how to run thousands of cases and hours."""

from pathlib import Path

import pytest

from effort import LONG, times
from python_runs import PATH, fine

HERE = Path(__file__).resolve().parent


def run(*words: str) -> str:
    return fine(*words, cwd=HERE.parents[1], **PATH)


def test_random_faults_at_random_moments() -> None:
    assert " 0 with a finding" in run(
        str(HERE / "faults.py"), "--cases", str(times(usual=3, long=20)), "--seed", "7"
    )


@pytest.mark.hosts
@pytest.mark.skipif(not LONG, reason="takes long; make test-long runs it")
def test_random_faults_on_two_hosts() -> None:
    words = ("--hosts", "--cases", "20", "--seed", "7")
    assert " 0 with a finding" in run(str(HERE / "faults.py"), *words)


@pytest.mark.skipif(not LONG, reason="lasts for a time; make test-long runs it")
def test_a_job_under_churn() -> None:
    found = run(str(HERE / "churn.py"), "--minutes", "0.2", "--every", "3", "--ranks", "4")
    assert "nothing wrong" in found
