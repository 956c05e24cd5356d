"""Cannot be imported in a rank."""

import sys

import pytest

if "unisono.testing.groups" in sys.modules:
    raise ImportError("not in a rank")


@pytest.mark.ranks(2)
def test():
    raise AssertionError
