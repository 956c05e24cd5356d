"""CUDA tensors over real NCCL. One rank is all that one GPU can show; with two GPUs, two ranks."""

import pytest
import torch

from unisono.torch import cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(cuda.why_not()), reason=f"NOT RUN, CUDA tensors over NCCL: {cuda.why_not()}"),
]

if not cuda.why_not():
    torch.zeros(1, device="cuda")  # the driver's files stay open from here on, before a test is watched


def test_cuda_tensors_and_cpu_tensors_in_one_group(forks, tmp_path):
    size = min(2, torch.cuda.device_count())
    printed = forks.run(tmp_path, {"cuda": ("programs.on_cuda", size, [])})["cuda"]
    assert all("fine" in text for text in printed), printed
