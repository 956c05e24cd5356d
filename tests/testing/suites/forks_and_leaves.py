"""Processes that a test forks leave it as a rank does. Which tests fail is in test_pytest_ranks.py."""

import os
import sys
import time

import pytest


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["returns", "raises", "exits"])
def test_forks(group, way):
    if group.rank == 0 and os.fork() == 0:
        assert way != "raises", "in the child"
        if way == "exits":
            sys.exit(3)
        return
    time.sleep(0.3)
    group.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrong", [True, False, True])
def test_after(group, wrong):
    assert not wrong


@pytest.mark.ranks(2)
def test_child_code(group):
    if (pid := os.fork()) == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
