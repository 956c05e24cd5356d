"""What all programs of clients share: which backend they ask for, and what they report to run_clients.py."""

import json
import os
import time

import torch
import torch.distributed as dist

BACKEND = os.environ["CLIENT_BACKEND"]
"""The name that the program asks for: "gloo" or "unisono"."""

STEPS = 20


class Steps:
    """The losses and times of a training loop's steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.times_s: list[float] = []
        self._last = time.perf_counter()

    def done(self, loss: torch.Tensor | float) -> None:
        """A step has ended; its loss is averaged over the ranks outside the step's time."""
        self.times_s.append(time.perf_counter() - self._last)
        mean = torch.tensor([float(loss)])
        dist.all_reduce(mean)
        self.losses.append(mean.item() / dist.get_world_size())
        self._last = time.perf_counter()

    def report(self, weights: torch.Tensor, client: str = "") -> None:
        """All ranks hold the same weights; rank 0 prints the record that run_clients.py reads."""
        everybody = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, weights.contiguous())
        assert all(torch.equal(each, everybody[0]) for each in everybody)
        kind = type(dist.group.WORLD).__name__
        middle = sorted(self.times_s)[len(self.times_s) // 2]
        if dist.get_rank() == 0:
            record = {"losses": self.losses, "step_ms": 1e3 * middle, "group": kind, "client": client}
            print("CLIENT " + json.dumps(record), flush=True)


def net(width: int = 64) -> torch.nn.Module:
    """A small model, the same on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.Linear(width, 1),
    )


def data(steps: int = STEPS, batch: int = 8, width: int = 64) -> torch.Tensor:
    """The samples of all ranks, the same on every rank."""
    return torch.randn(steps * batch * 2, width, generator=torch.Generator().manual_seed(1))
