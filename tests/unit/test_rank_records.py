"""What a rank knows about the others without a word from them."""

from __future__ import annotations

import os

import pytest

from unisono import _native


def test_a_rank_that_has_not_made_its_engine_is_named_by_its_process() -> None:
    region = _native.Region(-1, 2, 1 << 16, True)
    engine = _native.Engine(region, 0, [-1, -1], -1, 2, 0.0, 1 << 18, pids=[os.getpid(), 4242])
    assert engine.record_of(0).pid == os.getpid()
    assert engine.record_of(1).pid == 4242


def test_as_many_processes_as_ranks() -> None:
    region = _native.Region(-1, 2, 1 << 16, True)
    with pytest.raises(ValueError, match="name every rank once"):
        _native.Engine(region, 0, [-1, -1], -1, 2, 0.0, 1 << 18, pids=[1])
