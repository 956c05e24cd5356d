"""Groups whose timeout is longer than the kernel's waits can be."""

from __future__ import annotations

from pathlib import Path

import pytest

import ranks

pytestmark = pytest.mark.usefixtures("spread")

PROGRAM = """
import math, os, sys
from datetime import timedelta
import numpy as np
import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"], timeout=eval(sys.argv[1]))
half = group.subgroup([1, 0])
x = np.ones(4)
half.all_reduce(x, timeout=eval(sys.argv[1]))
half.timeout_s = eval(sys.argv[1]) or 60
half.barrier(async_op=True).wait(eval(sys.argv[1]))
other = 1 - group.rank
group.sendrecv(x, other, np.empty(4), other, timeout=eval(sys.argv[1]))
assert x[0] == 2, x
half.close()
group.close()
"""


@pytest.mark.parametrize("timeout", ["1e10", "math.inf", "timedelta.max", "timedelta(days=10000)", "2.2e6"])
def test_a_group_is_made_and_used(timeout: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks.processes(2, program, timeout)


def test_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "1e10")
    monkeypatch.setenv("UNISONO_PEER_TIMEOUT_S", "1e10")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks.processes(2, program, "None")
