"""torch.compile with its default backend on virtual GPUs has the numbers of eager mode."""

from pathlib import Path
from typing import Any

import pytest

from effort import LONG

PROGRAM = Path(__file__).parent / "programs" / "compiled_cases.py"
UNCOMPILED = ("flex_attention",)  # with gradients, the CPU's Inductor has none
# A case is compiled for seconds. These are what a device changes: copies, writes, collectives, draws.
USUAL = ("writes_its_inputs", "both_devices", "collectives_in_the_graph", "draws", "triton_kernels")


@pytest.mark.slow
@pytest.mark.parametrize("machine", [2], indirect=True)
def test_compiled_programs_have_the_numbers_of_eager_mode(machine: Any):
    ended = machine.run(PROGRAM, arguments=[] if LONG else USUAL)
    assert not any(ended.codes), ended.text
    notices = [line for line in ended.printed[0].splitlines() if "runs uncompiled" in line]
    assert len(notices) <= len(UNCOMPILED), ended.text
