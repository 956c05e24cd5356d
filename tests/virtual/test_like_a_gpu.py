"""The same program on a virtual GPU, and on a real one where there is one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from effort import HANG_S
from ports import reserved
from unisono.torch import cuda

PROGRAM = Path(__file__).parent / "programs" / "like_a_gpu.py"


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_a_virtual_gpu_is_like_a_gpu(machine: Any):
    ended = machine.run(PROGRAM)
    assert ended.codes == [0], ended.text
    assert "like a GPU" in ended.text


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda.why_not()), reason=f"NOT RUN, a real GPU: {cuda.why_not()}")
def test_a_real_gpu_is_like_a_gpu():
    with reserved() as port:
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = subprocess.run(
            [sys.executable, str(PROGRAM)],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
            env=environ,
        )
    assert "like a GPU" in done.stdout, done.stdout + done.stderr
