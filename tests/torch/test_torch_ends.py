"""Every way to end a process in every state of a process group, as tests/conformance/test_process_ends.py."""

import os
import sys

import pytest

import ranks
import suite
from effort import HANG_S, times
from python_runs import ran

PROGRAM = suite.HERE / "programs" / "ends_with_a_group.py"
ROUNDS = times(usual=1, long=100)
LIMIT_S = HANG_S + 60 * ROUNDS


@pytest.mark.timeout(LIMIT_S + 10)
def test_a_process_with_a_process_group_ends_as_python_ends_it() -> None:
    """PyTorch's frames on a daemon thread met Python's end: SIGABRT."""
    done = ran(PROGRAM, ROUNDS, limit_s=LIMIT_S, PYTHONPATH=os.pathsep.join([str(ranks.HERE), *sys.path]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("0 of "), done.stdout
