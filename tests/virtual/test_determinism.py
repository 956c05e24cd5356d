"""`torch.use_deterministic_algorithms(True)` refuses on a virtual GPU what it refuses on a GPU."""

from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "programs" / "determinism.py"


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_what_a_gpu_refuses_is_refused(machine: Any):
    ended = machine.run(PROGRAM)
    assert ended.codes == [0], ended.text
