"""`up.Pipe` over virtual GPUs of one process, and data parallel over such pipelines."""

from pathlib import Path
from typing import Any

import pytest

from effort import swept

PIPED = Path(__file__).resolve().parents[1] / "torch" / "parallel" / "piped.py"


@pytest.mark.parametrize("machine", [2], indirect=True)
@pytest.mark.parametrize("check", [{}, {"TORCH_CUDA_SANITIZER": "1"}])
def test_a_program_for_pytorchs_pipe(machine: Any, check: dict[str, str]) -> None:
    program = Path(__file__).with_name("programs") / "pipes.py"
    ended = machine.run(program, 1, **check)
    assert not any(ended.codes), ended.text
    assert "as the plain model" in ended.text


@pytest.mark.parametrize("machine", [4], indirect=True)
@pytest.mark.parametrize("backend", swept(["nccl"], ["gloo", "unisono"]))
def test_beside_data_parallel_with_checkpoints(machine: Any, backend: str, tmp_path: Path) -> None:
    ended = machine.run(PIPED, 2, arguments=[backend, str(tmp_path)])
    assert not any(ended.codes), ended.text
    assert ended.text.count("the losses of one process") == 2
