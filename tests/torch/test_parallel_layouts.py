"""`up.shard`: random chains give one process's values and gradients, and move no more bytes than DTensor
does.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import suite
import unisono.parallel as up
from effort import HANG_S, swept
from loops import each
from parallel import chains
from unisono.parallel.layouts.redistribute import transform_path

WHOLE, SUM = Replicate(), Partial()


def run(forks: suite.Forks, folder: Path, size: int, which: str, limit_s: float) -> dict[str, Any]:
    printed = forks.run(folder, {"chains": ("parallel.chains", size, [which])}, limit_s=limit_s)["chains"]
    written = folder / "chains" / "results.json"
    if not written.exists():
        pytest.fail("\n".join(printed), pytrace=False)
    found: dict[str, Any] = json.loads(written.read_text())
    return found


@pytest.mark.parametrize("size", swept([size for size in chains.SIZES if size < 8], [8]))
def test_chains(forks: suite.Forks, tmp_path: Path, size: int) -> None:
    counts = run(forks, tmp_path, size, "check", HANG_S)["bytes"]
    if size > 2:
        assert counts["less"] > 0, counts
        assert counts["theirs"] > 0, "nobody counted"


SWEEP = (pytest.mark.slow, pytest.mark.sweep, pytest.mark.timeout(900))  # DTensor takes seconds for a layout
FEWER = {2: 8, 4: 8, 6: 12, 8: 12}  # chains, of twelve, with PyTorch 2.13; DTensor moves more since 2.15


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=SWEEP) for size in (4, 6, 8))])
def test_chains_move_no_more_bytes_than_dtensor(forks: suite.Forks, tmp_path: Path, size: int) -> None:
    """The table of docs/shard.md, by `make test-parallel ARGS="-k dtensor -s"`."""
    found = run(forks, tmp_path, size, "compare", 200 if size == 2 else 800)
    assert len(found) == 12
    assert all(ours <= theirs for ours, theirs in found.values()), found
    ours, theirs = (sum(pair[at] for pair in found.values()) for at in (0, 1))
    fewer = sum(ours < theirs for ours, theirs in found.values())
    print(f"{size} ranks: {ours:.0f} bytes, DTensor {theirs:.0f}, fewer in {fewer} of {len(found)}")
    assert fewer >= FEWER[size]


@each(
    ("start", "goal", "kinds"),
    [
        ((Shard(0), Shard(0)), (WHOLE, WHOLE), ["all_gather"]),
        ((WHOLE, WHOLE), (Shard(0), Shard(0)), ["slice"]),
        ((Shard(0), Shard(0)), (Shard(1), Shard(1)), ["all_to_all"]),
        ((SUM, SUM), (WHOLE, WHOLE), ["all_reduce"]),
        ((SUM, WHOLE), (Shard(0), WHOLE), ["reduce_scatter"]),
        ((Shard(1), WHOLE), (Shard(1), Shard(0)), ["slice"]),
        ((Shard(0), Shard(1)), (Shard(0), Shard(1)), []),
    ],
)
def test_the_cheapest_way(start: tuple, goal: tuple, kinds: list[str]) -> None:
    assert [move.kind for move in transform_path(start, goal, (64, 64), 4, (2, 2), up.Link()).moves] == kinds


def test_the_price_decides() -> None:
    """From a partial sum to whole: in two steps where messages are cheap and bytes dear would be the same
    bytes; one.
    """
    start, goal = (SUM, Shard(0)), (Shard(0), WHOLE)
    bytes_matter = transform_path(start, goal, (64, 64), 4, (2, 2), up.Link(latency_s=0.0))
    assert bytes_matter.nbytes <= transform_path(start, goal, (64, 64), 4, (2, 2), up.Link(byte_s=0.0)).nbytes
    with pytest.raises(ValueError, match="no way"):
        transform_path((WHOLE,), (SUM,), (4, 4), 4, (2,), up.Link())


def test_odd_shapes_are_never_cut_unevenly() -> None:
    found = transform_path((SUM, WHOLE), (WHOLE, WHOLE), (3, 5), 4, (2, 2), up.Link())
    assert [move.kind for move in found.moves] == ["all_reduce"]
    assert torch.float32.itemsize * 15 == found.nbytes
