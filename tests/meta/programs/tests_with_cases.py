"""Tests with several cases in one item, some of which fail. Copied and run by test_loops.py."""

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
