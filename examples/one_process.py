"""One process: data parallel by threads, and a model split over two devices. Both give one process's losses.

Why one process for each device is better: docs/training.md. Threads share Python's lock. One replica
gathers all gradients, steps, and sends parameters on, while the others wait.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from transformer import assert_same_losses, batches, loss_of, optimizer_of, transformer

REPLICAS = 2


def by_threads() -> list[float]:
    """Scatter rows, run a replica in each thread, gather gradients in the first, step, copy parameters."""
    model = transformer()
    replicas = [model, *(copy.deepcopy(model) for _ in range(REPLICAS - 1))]
    optimizer, losses = optimizer_of(model), []

    def work(replica: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
        replica.zero_grad()
        loss = loss_of(replica(x), y)
        loss.backward()
        return loss.item()

    with ThreadPoolExecutor(REPLICAS) as threads:
        for x, y in zip(*batches(), strict=True):
            found = threads.map(work, replicas, x.chunk(REPLICAS), y.chunk(REPLICAS))
            losses.append(sum(found) / REPLICAS)
            for first, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
                first.grad = (first.grad + sum(other.grad for other in others)) / REPLICAS
            optimizer.step()
            for replica in replicas[1:]:
                replica.load_state_dict(model.state_dict())
    return losses


def split(first: str = "cpu", second: str = "cpu") -> list[float]:
    """The first layers on one device, the rest on another; one of the two is always idle."""
    model = transformer()
    front, back = model[:3].to(first), model[3:].to(second)
    optimizer, losses = optimizer_of(model), []
    for x, y in zip(*batches(), strict=True):
        loss = loss_of(back(front(x.to(first)).to(second)), y.to(second))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    assert_same_losses(by_threads())
    assert_same_losses(split())
