"""Everything in checks/ on one, two and three ranks: each world size is one set of processes."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest

import suite


@functools.cache
def results(forks: suite.Forks, size: int) -> list[dict[str, str]]:
    """Run all checks on `size` ranks; per rank, the traceback of each (empty: it passed)."""
    with tempfile.TemporaryDirectory() as folder:
        printed = forks.run(Path(folder), {"checks": ("worker", size, [])}, limit_s=200)["checks"]
        written = [Path(folder, "checks", f"result{rank}.json") for rank in range(size)]
        if not all(path.exists() for path in written):
            return [{check: "\n".join(printed) for check in suite.checks()}]
        return [json.loads(path.read_text()) for path in written]


@pytest.mark.timeout(220)  # the first of a size runs all
@pytest.mark.parametrize("check", suite.checks())
@pytest.mark.parametrize("size", [2, 3])
def test_check(forks: suite.Forks, size: int, check: str):
    failed = {rank: result[check] for rank, result in enumerate(results(forks, size)) if result[check]}
    if failed:
        pytest.fail("\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items()), pytrace=False)
