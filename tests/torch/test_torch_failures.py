"""What the others see when a rank dies, is missing or calls something else; and groups made over and over."""

import json
import tempfile
from pathlib import Path

import pytest

import suite
from effort import judge_time

SIZE = 3


def results(forks: suite.Forks, way: str) -> list[dict]:
    """Fail in this way; what each survivor saw."""
    with tempfile.TemporaryDirectory() as folder:
        printed = forks.run(Path(folder), {way: ("programs.last_rank_fails", SIZE, [way])})[way]
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
        judge_time(seen["seconds"], 10)


@pytest.mark.parametrize("way", ["ddp", "ddp_fp16", "ddp_hook"])
def test_a_dead_rank_is_named_under_ddp(forks, way):
    """`except PeerLost` catches it."""
    for seen in results(forks, way):
        assert (seen["type"], seen["rank"]) == ("PeerLost", SIZE - 1), seen


@pytest.mark.parametrize("way", ["future", "ddp_own_hook", "ddp_checkpoint"])
def test_a_dead_rank_is_named_through_pytorchs_futures(forks, way):
    """PyTorch's C++ makes a RuntimeError of what a future failed with; of ours there is the text alone."""
    for seen in results(forks, way):
        assert seen["type"] in ("RuntimeError", "PeerLost"), seen
        assert f"PeerLost: all_reduce failed: rank {SIZE - 1}" in seen["text"] or seen["rank"] == SIZE - 1, (
            seen
        )
        # A callback of the user's, which meets the error, has frames of its own.
        assert way == "ddp_own_hook" or "At:" not in seen["text"], seen
        assert "work.py" not in seen["text"], seen


@pytest.mark.parametrize("way", ["new_group_dead", "new_group_left", "new_group_aborted", "split_left"])
def test_a_group_that_cannot_be_made(forks, way):
    for seen in results(forks, way):
        assert (seen["type"], seen["rank"]) == ("PeerLost", SIZE - 1), seen
        judge_time(seen["seconds"], 10)


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


def test_a_rank_that_missed_attempts_makes_the_next_one(forks, tmp_path):
    for printed in forks.run(tmp_path, {"missed": ("programs.missed", 2, [])})["missed"]:
        assert "fine" in printed, printed


def test_again_and_again_in_one_process(forks, tmp_path):
    for printed in forks.run(tmp_path, {"again": ("programs.again", 2, [])})["again"]:
        assert "fine" in printed, printed


def test_alone_over_a_store_of_threads(forks, tmp_path):
    for printed in forks.run(tmp_path, {"alone": ("programs.alone", 1, [])})["alone"]:
        assert "fine" in printed, printed
