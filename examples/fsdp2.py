"""FSDP2: every rank holds a part of each parameter, of its gradient and of its optimizer state.

    unisono run -n 2 examples/fsdp2.py

`fully_shard` gathers a block's parameters just before they are used, frees them after, and scatters the
summed gradients to their owners. The losses are those of one process with the whole batch.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from transformer import Block, assert_same_losses, batches, loss_of, optimizer_of, transformer


def main() -> None:
    dist.init_process_group("unisono")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    model = transformer()
    whole = sum(parameter.numel() for parameter in model.parameters())
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)  # gathered and freed together, while the others stay in parts
    fully_shard(model, mesh=mesh)  # what is left: embedding and last layer
    mine = sum(parameter.to_local().numel() for parameter in model.parameters())
    print(f"rank {rank} holds {mine} of {whole} parameters", flush=True)
    assert mine < whole / size * 1.1  # rows are dealt out whole, so not exactly the same everywhere

    optimizer, losses = (
        optimizer_of(model),
        [],
    )  # after sharding: it sees, and keeps state for, this rank's part
    for x, y in zip(*batches(), strict=True):
        loss = loss_of(model(x.chunk(size)[rank]), y.chunk(size)[rank])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = loss.detach().clone()
        dist.all_reduce(average, dist.ReduceOp.AVG)
        losses.append(average.item())
    assert_same_losses(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
