"""Cases that run in one item: every one runs, one that fails is named and fails alone."""

import shutil
from pathlib import Path

import pytest

from loops import each
from python_runs import ran

SUPPORT = Path(__file__).resolve().parents[1] / "support"

PROGRAM = Path(__file__).parent / "programs" / "tests_with_cases.py"


def test_a_case_that_fails_is_named_and_the_others_run(tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path / "test_program.py")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {SUPPORT}\n")
    done = ran("-m", "pytest", "-rA", "-p", "no:cacheprovider", cwd=tmp_path)
    lines = done.stdout.splitlines()
    for beginning, end in (
        ("E       AssertionError: a wrong pair", ""),
        ("SUBFAILED(size=1, root=1, name='b')", ""),
        ("SUBFAILED(size=2, root=2, name='c')", ""),
        ("PASSED", "test_all_ran"),
        ("seconds = 60", ""),  # the time that was over ends the item
    ):
        assert any(line.startswith(beginning) and end in line for line in lines), done.stdout
    assert "seconds = 61" not in done.stdout


def test_no_cases_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="there are no cases of size"):
        each("size", [])
