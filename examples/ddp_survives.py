"""DDP goes on without a rank that dies: `dist.shrink_group` makes the group of those that are left.

    unisono run --elastic 1:4 examples/ddp_survives.py

Rank 1 kills itself in a backward. The others do the step again with the same batch. If one of them has
completed the mean of the losses, all have their gradients; then those without the update make it now.
The losses are those of one process with the whole batch.
"""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import SHRINK_ABORT
from torch.nn.parallel import DistributedDataParallel

import unisono.torch  # noqa: F401  registers the backend "unisono"
from transformer import STEPS, assert_same_losses, batches, loss_of, optimizer_of, transformer
from unisono.errors import PeerLost


def mean(loss: torch.Tensor) -> float:
    """The mean over all ranks. Whoever has it knows that all have their gradients."""
    dist.all_reduce(found := loss.detach().clone(), dist.ReduceOp.AVG)
    return found.item()


def agreed(losses: list[float], optimizer: torch.optim.Optimizer) -> list[float]:
    """Bring all ranks to the newest step that one of them has made. Return its losses."""
    seen: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(seen, losses)
    if len(losses) < max(map(len, seen)):
        optimizer.step()
    return max(seen, key=len)


def main() -> None:
    dist.init_process_group("unisono")
    doomed = dist.get_rank() == 1
    module, (inputs, targets) = transformer(), batches()
    optimizer, losses = optimizer_of(module), []
    model = DistributedDataParallel(module)
    while len(losses) < STEPS:
        rank, size = dist.get_rank(), dist.get_world_size()
        x, y = inputs[len(losses)], targets[len(losses)]
        if doomed and len(losses) == 3:
            model.module[0].token.weight.register_hook(lambda _: signal.raise_signal(signal.SIGKILL))
        try:
            loss = loss_of(model(x.chunk(size)[rank]), y.chunk(size)[rank])
            optimizer.zero_grad()
            loss.backward()
            losses.append(mean(loss))
            optimizer.step()
        except PeerLost as error:
            dist.shrink_group([error.rank], shrink_flags=SHRINK_ABORT)
            losses = agreed(losses, optimizer)
            model = DistributedDataParallel(module)  # over the new group
    print(f"rank {rank} of {size}", flush=True)
    assert_same_losses(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
