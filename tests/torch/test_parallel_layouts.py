"""`up.shard`: random chains under random strategies give one process's values and gradients."""

from pathlib import Path

import pytest

import suite
from effort import HANG_S, swept
from parallel import chains


@pytest.mark.parametrize(
    "size", swept([size for size in chains.SIZES if size < 5], [size for size in chains.SIZES if size > 4])
)
def test_chains(forks: suite.Forks, tmp_path: Path, size: int) -> None:
    printed = forks.run(tmp_path, {"chains": ("parallel.chains", size, [])}, limit_s=HANG_S)["chains"]
    if any("(ended with " in text for text in printed):
        pytest.fail("\n".join(printed), pytrace=False)
