"""`dist.shrink_group` over "nccl" on virtual GPUs, as PyTorch's own tests of it ask."""

from pathlib import Path
from typing import Any

import pytest

from effort import LONG

PROGRAM = Path(__file__).parent / "programs" / "shrinks_with_gpus.py"
WAYS = ("basic", "first", "unbound", "several", "aborted", "options", "subgroup", "repeated", "validated")


@pytest.mark.parametrize("machine", [2, 4] if LONG else [4], indirect=True)
def test_ranks_with_gpus_are_excluded(machine: Any, subtests: pytest.Subtests):
    for way in WAYS:
        with subtests.test(way):
            ended = machine.run(PROGRAM, arguments=[way])
            assert not any(ended.codes), ended.text
            assert all(text.endswith("fine\n") for text in ended.printed), ended.text
