"""Train with a limit on memory: `python -m parallel.limited swapped|plain MEGABYTES` prints the losses.

State: parameters, gradients and two moments of AdamW. The limit is on what comes on top of Python and
    PyTorch.
"""

import resource
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel import Swapped

WIDTH, LAYERS, STEPS = 512, 24, 3
STATE_MB = 16 * LAYERS * (WIDTH * WIDTH + WIDTH) / 1e6


def virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


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


def main(how: str, megabytes: float) -> None:
    torch.set_num_threads(1)
    small = Swapped(
        model(2), optimizer=optimizer, loss=functional.mse_loss
    )  # libraries and threads come first
    small.step((batches()[0], batches()[0]))
    small.close()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = virtual_bytes() + int(megabytes * 1e6)
    trained = model(LAYERS)
    if how == "plain":
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        print(plain(trained))
        return
    with Swapped(trained, optimizer=optimizer, loss=functional.mse_loss) as swapped:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        print([swapped.step((x, x)) for x in batches()])
        print(
            f"waiting for the disk: {swapped.waited_s / swapped.step_s:.0%} of the last step", file=sys.stderr
        )
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
