"""What the others see when a rank dies, is missing or calls something else; and groups made over and over."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest

import suite

SIZE = 3
WAYS = ("loop", "works", "unwaited", "future", "ddp", "never", "mismatch", "closed")


@functools.cache
def results(forks: suite.Forks) -> dict[str, list]:
    """Run every way to fail; per way, what each survivor saw."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = {way: ("programs.dies", SIZE, [way]) for way in WAYS}
        printed = forks.run(Path(folder), {**jobs, "again": ("programs.again", 2, [])}, limit_s=30)
        return {"again": printed["again"], **{way: _seen(Path(folder, way), printed[way]) for way in WAYS}}


def _seen(folder: Path, printed: list[str]) -> list[dict]:
    paths = [folder / f"seen{rank}" for rank in range(SIZE - 1)]
    if not all(path.exists() for path in paths):
        return [{"type": "no result", "text": "\n".join(printed), "rank": None, "seconds": 0}]
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize("way", ["loop", "works", "unwaited"])
def test_a_dead_rank_is_named(forks, way):
    for seen in results(forks)[way]:
        assert (seen["type"], seen["rank"]) == ("PeerLost", SIZE - 1), seen
        assert seen["seconds"] < 10


@pytest.mark.parametrize("way", ["future", "ddp"])
def test_a_dead_rank_is_named_through_pytorchs_futures(forks, way):
    # PyTorch's C++ makes a RuntimeError of whatever a future failed with; the text is ours.
    for seen in results(forks)[way]:
        assert seen["type"] in ("RuntimeError", "PeerLost"), seen
        assert "PeerLost" in seen["text"] or seen["rank"] == SIZE - 1, seen
        assert f"rank {SIZE - 1}" in seen["text"]


def test_a_rank_that_never_comes(forks):
    for seen in results(forks)["never"]:
        assert seen["type"] == "Timeout", seen
        assert f"rank {SIZE - 1}" in seen["text"]


def test_ranks_that_call_different_things(forks):
    for seen in results(forks)["mismatch"]:
        assert seen["type"] == "Mismatch", seen


def test_use_after_destroy(forks):
    for seen in results(forks)["closed"]:
        assert seen["type"] == "GroupClosed", seen


def test_again_and_again_in_one_process(forks):
    for printed in results(forks)["again"]:
        assert "fine" in printed, printed
