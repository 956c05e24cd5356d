"""Save on rank 0, wait, load everywhere, and go on as if nothing had happened.

    unisono run -n 2 examples/checkpoint.py [FILE]

Ranks that load before rank 0 has written find nothing, or half a file: hence the barrier. Tensors saved from
cuda:0 would all be loaded onto cuda:0, by every rank: hence map_location.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from transformer import STEPS, assert_same_losses, batches, loss_of, optimizer_of, transformer


def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, targets, losses = *batches(), []
    for step in steps:
        loss = loss_of(model(inputs[step].chunk(size)[rank]), targets[step].chunk(size)[rank])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
        dist.all_reduce(losses[-1], dist.ReduceOp.AVG)
    return [loss.item() for loss in losses]


def main() -> None:
    dist.init_process_group("unisono")
    path = sys.argv[1] if len(sys.argv) > 1 else f"{tempfile.gettempdir()}/unisono_example.pt"
    model = DistributedDataParallel(transformer())
    optimizer = optimizer_of(model)
    losses = train(model, optimizer, range(STEPS // 2))
    if dist.get_rank() == 0:  # model.module: names without DDP's "module." in front
        torch.save((model.module.state_dict(), optimizer.state_dict()), path)
    dist.barrier()

    device = torch.device("cpu")  # with GPUs: torch.device("cuda", LOCAL_RANK), never the global rank
    saved_model, saved_optimizer = torch.load(path, map_location=device, weights_only=True)
    plain = transformer()
    plain.load_state_dict(saved_model)
    model = DistributedDataParallel(plain.to(device))  # .to first: DDP lays out its buckets for this device
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(saved_optimizer)  # without it the momentum begins at zero again
    losses += train(model, optimizer, range(STEPS // 2, STEPS))
    assert_same_losses(losses)  # with those of a run that nothing interrupted
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
