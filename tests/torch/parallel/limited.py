"""Train with a limit on memory: `main(rank, size, folder, how, megabytes)` writes the losses.

State: parameters, gradients and two moments of AdamW. The limit is on what comes on top of Python and
    PyTorch.
"""

import ctypes
import json
import resource
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel import Swapped

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


def plain(trained: nn.Module) -> list[float]:
    made, losses = optimizer(list(trained.parameters())), []
    for x in batches():
        made.zero_grad()
        loss = functional.mse_loss(trained(x), x)
        loss.backward()
        made.step()
        losses.append(loss.item())
    return losses


def batches() -> list[torch.Tensor]:
    return list(torch.randn(STEPS, 4, WIDTH, generator=torch.Generator().manual_seed(1)))


def main(rank: int, size: int, folder: Path, how: str, megabytes: str) -> None:
    torch.set_num_threads(1)
    give_freed_memory_back()
    small = Swapped(
        model(2), optimizer=optimizer, loss=functional.mse_loss
    )  # libraries and threads come first
    small.step((batches()[0], batches()[0]))
    small.close()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = virtual_bytes() + int(float(megabytes) * 1e6)
    trained = model(LAYERS)
    if how == "plain":
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        losses = plain(trained)
    else:
        with Swapped(trained, optimizer=optimizer, loss=functional.mse_loss) as swapped:
            resource.setrlimit(resource.RLIMIT_AS, (limit, most))
            losses = [swapped.step((x, x)) for x in batches()]
            print(f"waiting for the disk: {swapped.waited_s / swapped.step_s:.0%} of the last step")
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
    (folder / "losses.json").write_text(json.dumps(losses))
