"""A failing test run says why at once, and a shared traceback once."""

import shutil
from pathlib import Path

import pytest

from python_runs import ran

SUPPORT = Path(__file__).resolve().parents[1] / "support"
TESTS = Path(__file__).parent / "programs" / "failing_tests.py"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_reason_comes_first_and_once(tmp_path: Path, workers: str):
    shutil.copy(TESTS, tmp_path / "test_some.py")
    words = ("-p", "failure_reports", "-n", workers, "-v", "-p", "no:cacheprovider")
    done = ran("-m", "pytest", *words, cwd=tmp_path, PYTHONPATH=SUPPORT, PY_COLORS="0")
    running, _, listed = done.stdout.partition("= FAILURES =")
    assert running.count(": ends in the cause\n") == 1
    assert "FAILED test_some.py::test_of_its_own: assert (1 + 1) == 3" in running
    assert listed.count("traceback\n") <= 2  # pytest's own summary has whole messages where CI is set
    assert listed.count("as test_some.py::test_of_one_fault[") >= 39
    assert "41 failed, 1 passed" in listed
