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


NAMED = [
    "loop", "works", "unwaited",
    "ddp", "ddp_fp16", "ddp_hook",  # `except PeerLost` catches it
    "new_group_dead", "new_group_left", "new_group_aborted", "split_left",
]  # fmt: skip


@pytest.mark.parametrize("way", NAMED)
def test_a_dead_rank_is_named(forks, way):
    for seen in results(forks, way):
        assert (seen["type"], seen["rank"]) == ("PeerLost", SIZE - 1), seen
        judge_time(seen["seconds"], 10)


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


@pytest.mark.parametrize(
    ("way", "kind", "says"),
    [("never", "Timeout", f"rank {SIZE - 1}"), ("mismatch", "Mismatch", ""), ("closed", "GroupClosed", "")],
)
def test_what_is_wrong_is_told(forks, way, kind, says):
    """A rank never comes, calls something else, or the group is used after its end."""
    for seen in results(forks, way):
        assert seen["type"] == kind, seen
        assert says in seen["text"]


@pytest.mark.parametrize("program", ["missed", "again"])
def test_groups_are_made_after_others(forks, tmp_path, program):
    """After attempts that this rank has missed; again and again."""
    for printed in forks.run(tmp_path, {program: (f"programs.{program}", 2, [])})[program]:
        assert "fine" in printed, printed


def test_alone_over_a_store_of_threads(forks, tmp_path):
    for printed in forks.run(tmp_path, {"alone": ("programs.alone", 1, [])})["alone"]:
        assert "fine" in printed, printed
