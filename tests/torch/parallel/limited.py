"""A model whose training has a limit on memory.

State: parameters, gradients and two moments of AdamW. The limit is on what comes on top of Python and
    PyTorch.
"""

import ctypes
import resource
from pathlib import Path

import torch
from torch import nn

WIDTH, LAYERS, STEPS = 512, 24, 3
STATE_MB = 16 * LAYERS * (WIDTH * WIDTH + WIDTH) / 1e6
M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3  # of mallopt


def virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def give_freed_memory_back() -> None:
    for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 65536)):
        ctypes.CDLL(None).mallopt(option, value)


def model(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def batches() -> list[torch.Tensor]:
    return list(torch.randn(STEPS, 4, WIDTH, generator=torch.Generator().manual_seed(1)))
