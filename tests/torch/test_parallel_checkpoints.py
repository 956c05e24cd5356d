"""Checkpoints: any plan goes on where any other stopped; a crash leaves the previous one whole; old ones
go.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import suite
from effort import SWEEP, swept


def job(do: str, model: str, **plan: Any) -> dict[str, Any]:
    return {"do": do, "model": model, "plan": plan}


@pytest.mark.sweep  # two ranks do so in fused_saves.py and program_stages.py
def test_saved_by_four_data_ranks_and_continued_otherwise(forks: suite.Forks, tmp_path: Path) -> None:
    (alone,) = forks.losses(tmp_path / "a", 1, job("all", "tied"))
    (first,) = forks.losses(tmp_path / "b", 4, job("first", "tied", data=4, zero=2))
    steps = sorted(path.name for path in (tmp_path / "shared").iterdir())
    assert steps == ["step-00000002", "step-00000003"]
    others = forks.losses(
        tmp_path / "c",
        4,
        *swept(
            [
                job("rest", "tied", tensor=2, pipeline=2, micro_batches=2),
                job("rest", "tied", data=4, zero=1, shard=2),
            ],
            [job("rest", "tied", data=2, pipeline=2, zero=3, schedule="interleaved", micro_batches=2)],
        ),
    )
    for rest in others:
        assert first + rest == pytest.approx(alone, abs=1e-5)


def test_another_models_checkpoint_is_refused(forks: suite.Forks, tmp_path: Path) -> None:
    forks.losses(tmp_path / "a", 1, job("first", "mlp"))
    folder = tmp_path / "b"
    folder.mkdir()
    arguments = [str(tmp_path / "shared"), json.dumps(job("rest", "conv"))]
    (printed,) = forks.run(folder, {"saves": ("parallel.saves", 1, arguments)})["saves"]
    assert "it is of another model" in printed


@pytest.mark.slow
@pytest.mark.parametrize("step", swept([1], [2]), ids={1: "replaced", 2: "next"}.get)
def test_a_save_killed_at_each_of_its_changes(forks: suite.Forks, tmp_path: Path, step: int) -> None:
    """Of either rank. `-s` prints the table of docs/checkpoints.md."""
    shared, table = str(tmp_path / "shared"), list[tuple[str, int, str]]()

    def attempt(number: int, rank: int, event: int) -> tuple[str, str]:
        """What the attempt before has left, and where this one is killed."""
        folder = tmp_path / f"{number}"
        folder.mkdir()
        arguments = [shared, str(rank), str(event), str(step)]
        printed = forks.run(folder, {"x": ("parallel.killed_saves", 2, arguments)})["x"]
        assert (folder / "x" / "left").exists(), printed
        found = re.findall(r"killed at (.*)", printed[rank])
        return (folder / "x" / "left").read_text(), found[0] if found else ""

    attempts = [(0, event) for event in range(0, 40, 1 if SWEEP else 4)] + [(1, event) for event in range(40)]
    number, last = 0, ""
    while attempts:
        rank, event = attempts.pop(0)
        left, where = attempt(number, rank, event)
        if last:
            table[-1] = (*table[-1][:2], left)
        number, last = number + 1, where
        if where:
            table.append((where, rank, ""))
        else:
            attempts = [one for one in attempts if one[0] != rank]
    print("\n" + "\n".join(f"| {where} | {rank} | {left} |" for where, rank, left in table))
    assert {left for *_, left in table} == {"before", "after"}
    assert {left for _, rank, left in table if rank == 1} == {"before"}
    assert len(table) >= (8 if SWEEP else 4)


def test_what_is_kept_beside_a_run_comes_back_as_it_was(forks: suite.Forks, tmp_path: Path) -> None:
    """A MultiStepLR, whose milestones are a dict with numbers for keys, lowers its rate after a load, too."""
    assert forks.run(tmp_path, {"beside": ("parallel.kept_beside", 1, [])}) == {"beside": ["rank 0:\n"]}
