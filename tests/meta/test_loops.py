"""Cases that run in one item: every one runs, one that fails is named and fails alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from loops import each

SUPPORT = Path(__file__).resolve().parents[1] / "support"

PROGRAM = """
    import time
    import pytest
    from loops import each

    ran = []

    @each("size", [1, 2])
    @each("root, name", [(0, "a"), (1, "b"), pytest.param(2, "c")])
    def test_pairs(tmp_path, size, root, name):
        ran.append((size, root, name))
        if (size, root) == (2, 2):
            pytest.skip("not this one")
        assert (size, name) != (1, "b"), "a wrong pair"

    def test_all_ran():
        assert ran == [(size, root, name) for size in (1, 2) for root, name in enumerate("abc")]

    @pytest.mark.timeout(0.5)
    @each("seconds", [0, 60, 61])
    def test_slow(seconds):
        time.sleep(seconds)
"""


def test_a_case_that_fails_is_named_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_program.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {SUPPORT}\n")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
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
