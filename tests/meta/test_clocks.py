"""Waits end by the monotonic clock: a step of the system's time does not lengthen them."""

import os
from pathlib import Path

import pytest

from unisono import _native


@pytest.mark.skipif(os.environ.get("UNISONO_SANITIZED") == "thread", reason="TSan knows only the wall clock")
def test_no_lock_waits_until_a_time_of_the_wall_clock():
    names = Path(_native.__file__).read_bytes().split(b"\0")
    assert not [name for name in names if name.startswith(b"pthread_mutex_timedlock")]
