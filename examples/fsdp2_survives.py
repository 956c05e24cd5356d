"""FSDP2 goes on without a replica that dies: hybrid sharding, in which each replica has all shards.

    unisono run --elastic 1:4 examples/fsdp2_survives.py

Ranks 0 and 1 are one replica, ranks 2 and 3 another. Rank 3 kills itself in a backward, and rank 2 leaves: it
has only a part of the model. The others keep their shards, over a new mesh, and do the step again as in
`ddp_survives.py`. The losses are those of one process with the whole batch.
"""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import SHRINK_ABORT
from torch.distributed.fsdp import fully_shard

from ddp_survives import agreed, mean
from transformer import STEPS, assert_same_losses, batches, loss_of, optimizer_of, transformer
from unisono.errors import PeerLost, UnisonoError


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model over all ranks that there are, and its optimizer."""
    shape = dist.get_world_size() // 2, 2
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    model = transformer()
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), optimizer_of(model)


@torch.no_grad()
def moved(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same shards over the ranks that there are now."""
    made, following = sharded()
    for old, new in zip(model.parameters(), made.parameters(), strict=True):
        new.to_local().copy_(old.to_local())
        for name, value in optimizer.state[old].items():
            following.state[new][name] = torch.empty_like(new)
            following.state[new][name].to_local().copy_(value.to_local())
    return made, following


def main() -> None:
    dist.init_process_group("unisono")
    (model, optimizer), losses, data, doomed = sharded(), [], batches(), dist.get_rank() == 3
    while len(losses) < STEPS:
        rank, size = dist.get_rank(), dist.get_world_size()
        x, y = (each[len(losses)].chunk(size)[rank] for each in data)
        try:
            optimizer.zero_grad()
            logits = model(x)
            if doomed and len(losses) == 3:
                logits.register_hook(lambda _: signal.raise_signal(signal.SIGKILL))
            (loss := loss_of(logits, y)).backward()
            losses.append(mean(loss))  # whoever has it: all have their gradients
            optimizer.step()
        except UnisonoError:  # perhaps of a group of the mesh, in which ranks have other numbers
            try:
                mean(torch.zeros(()))
                raise  # all live
            except PeerLost as error:
                lost = [error.rank, error.rank ^ 1]  # its replica
            if rank in lost:
                return
            dist.shrink_group(lost, shrink_flags=SHRINK_ABORT)
            losses = agreed(losses, optimizer)
            model, optimizer = moved(model, optimizer)
    print(f"rank {rank} of {size}", flush=True)
    assert_same_losses(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
