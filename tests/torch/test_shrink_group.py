"""`dist.shrink_group`: ranks go by will, die, or disagree. What PyTorch's tests for NCCL ask, and worse."""

from pathlib import Path

import pytest

from effort import LONG

SIZE = 4
DIE = {
    "killed": {0, 2}, "killed_unnoticed": {2}, "subgroup_killed": {1}, "further": {1, 2}, "during": {2},
    "store_ends": {2},
}  # fmt: skip


@pytest.mark.parametrize(
    "way",
    [
        "by_will", "twice", "destroyed_first", "killed", "killed_unnoticed", "pending", "subgroup",
        "subgroup_killed", "disagree", "further", "store_ends", "ends_at_once", "hooked", "wrong",
        "reconfigured",
    ],
)  # fmt: skip
def test_a_group_loses_ranks(forks, tmp_path: Path, way: str):
    found(forks, tmp_path, way, "unisono")


@pytest.mark.parametrize("way", ["by_will", "killed"])
def test_a_group_in_place_of_gloo(forks, tmp_path: Path, way: str):
    found(forks, tmp_path, way, "gloo")


@pytest.mark.parametrize("seed", range(20 if LONG else 4))
def test_a_rank_dies_during_the_call(forks, tmp_path: Path, seed: int):
    found(forks, tmp_path, "during", "unisono", str(seed))


def found(forks, folder: Path, way: str, backend: str, *more: str) -> None:
    printed = forks.run(folder, {way: ("programs.shrinks", SIZE, [way, backend, *more])})[way]
    for rank, text in enumerate(printed):
        expected = "(ended with -9)" if rank in DIE.get(way, ()) else "fine\n"
        assert text.endswith(expected), "\n".join(printed)
