"""What the others see when a rank dies, is missing or calls something else; and groups made over and over."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

import suite

SIZE = 3


def results(forks: suite.Forks, way: str) -> list[dict]:
    """Fail in this way; what each survivor saw."""
    with tempfile.TemporaryDirectory() as folder:
        printed = forks.run(Path(folder), {way: ("programs.dies", SIZE, [way])})[way]
        return _seen(Path(folder, way), printed)


def _seen(folder: Path, printed: list[str]) -> list[dict]:
    paths = [folder / f"seen{rank}" for rank in range(SIZE - 1)]
    if not all(path.exists() for path in paths):
        return [{"type": "no result", "text": "\n".join(printed), "rank": None, "seconds": 0}]
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize("way", ["loop", "works", "unwaited"])
def test_a_dead_rank_is_named(forks, way):
    for seen in results(forks, way):
        assert (seen["type"], seen["rank"]) == ("PeerLost", SIZE - 1), seen
        assert seen["seconds"] < 10


@pytest.mark.parametrize("way", ["future", "ddp", "ddp_fp16"])
def test_a_dead_rank_is_named_through_pytorchs_futures(forks, way):
    # PyTorch's C++ makes a RuntimeError of whatever a future failed with; the text is ours.
    for seen in results(forks, way):
        assert seen["type"] in ("RuntimeError", "PeerLost"), seen
        assert "PeerLost" in seen["text"] or seen["rank"] == SIZE - 1, seen
        assert f"rank {SIZE - 1}" in seen["text"]


def test_a_rank_that_never_comes(forks):
    for seen in results(forks, "never"):
        assert seen["type"] == "Timeout", seen
        assert f"rank {SIZE - 1}" in seen["text"]


def test_ranks_that_call_different_things(forks):
    for seen in results(forks, "mismatch"):
        assert seen["type"] == "Mismatch", seen


def test_use_after_destroy(forks):
    for seen in results(forks, "closed"):
        assert seen["type"] == "GroupClosed", seen


def test_again_and_again_in_one_process(forks, tmp_path):
    for printed in forks.run(tmp_path, {"again": ("programs.again", 2, [])})["again"]:
        assert "fine" in printed, printed


def test_alone_over_a_store_of_threads(forks, tmp_path):
    for printed in forks.run(tmp_path, {"alone": ("programs.alone", 1, [])})["alone"]:
        assert "fine" in printed, printed
