"""`up.shard`: random chains give one process's values and gradients, and move no more bytes than DTensor
does.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import suite
from loops import each
from parallel import chains
from unisono.parallel.layouts.price import Link
from unisono.parallel.layouts.redistribute import route

WHOLE, SUM = Replicate(), Partial()


@pytest.mark.timeout(220)
@pytest.mark.parametrize("size", chains.SIZES)
def test_chains(forks: suite.Forks, tmp_path: Path, size: int) -> None:
    printed = forks.run(tmp_path, {"chains": ("parallel.chains", size, [])}, limit_s=200)["chains"]
    written = tmp_path / "chains" / "results.json"
    if not written.exists():
        pytest.fail("\n".join(printed), pytrace=False)
    counts = json.loads(written.read_text())["bytes"]
    if size > 2:
        assert counts["less"] > 0, counts
        assert counts["theirs"] > 0, "nobody counted"


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
    assert [move.kind for move in route(start, goal, (64, 64), 4, (2, 2), Link()).moves] == kinds


def test_the_price_decides() -> None:
    """From a partial sum to whole: in two steps where messages are cheap and bytes dear would be the same
    bytes; one.
    """
    start, goal = (SUM, Shard(0)), (Shard(0), WHOLE)
    bytes_matter = route(start, goal, (64, 64), 4, (2, 2), Link(latency_s=0.0))
    assert bytes_matter.nbytes <= route(start, goal, (64, 64), 4, (2, 2), Link(byte_s=0.0)).nbytes
    with pytest.raises(ValueError, match="no way"):
        route((WHOLE,), (SUM,), (4, 4), 4, (2,), Link())


def test_odd_shapes_are_never_cut_unevenly() -> None:
    found = route((SUM, WHOLE), (WHOLE, WHOLE), (3, 5), 4, (2, 2), Link())
    assert [move.kind for move in found.moves] == ["all_reduce"]
    assert torch.float32.itemsize * 15 == found.nbytes
