"""A rank of suite_over_mpi.py: suite_ranks.py NOTES ONLY [TEST ...]; runs all tests but those named.

Rank 0 writes a line as a test begins, and completes it with how the test ended on all ranks.
"""

import os
import sys
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._triton

torch.utils._triton.has_triton = lambda **_: False
from torch.testing._internal import common_distributed as harness  # noqa: E402

notes, only, *done = sys.argv[1:]
torch.manual_seed(0)  # the suite compares its module with that of every rank
dist.init_process_group("mpi")
os.environ["WORLD_SIZE"] = str(dist.get_world_size())
for feature in ("ddp", "subgroup", "plugin"):
    harness.DistTestCases.backend_feature[feature].add("mpi")
import torch.testing._internal.distributed.distributed_test as suite  # noqa: E402

SKIPS = {skip.exit_code: skip.message for skip in harness.TEST_SKIPS.values()}


class TestMpi(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """PyTorch's tests, in this process."""

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def setUp(self) -> None:
        self.rank = dist.get_rank()
        self.file_name = os.environ["TEMP_DIR"] + "/file"

    def tearDown(self) -> None:
        pass


def run(name: str) -> str:
    method = getattr(suite.DistributedTest._DistTestBase, name)
    if getattr(method, "__unittest_skip__", False):
        return f"skipped: {method.__unittest_skip_why__}"
    test: Any = TestMpi(name)
    test.setUp()
    try:
        method(test)
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as end:
        return f"skipped: {SKIPS[end.code]}" if end.code in SKIPS else f"exit code {end.code}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return "passed"


def note(text: str) -> None:
    if dist.get_rank() == 0:
        with Path(notes).open("a") as file:
            file.write(text)


for name in vars(suite.DistributedTest._DistTestBase):
    if name.startswith("test_") and only in name and name not in done:
        note(name)
        ends: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ends, run(name))
        worst = next((end for end in ends if not end.startswith(("passed", "skipped"))), ends[0])
        note(f"\t{worst[:300]}\n")
dist.destroy_process_group()
