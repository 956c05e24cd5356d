"""DDP trains as one process with the whole batch does: the losses agree, step by step.

    unisono run -n 2 examples/data_parallel.py

Each rank takes its part of every batch. DDP averages the gradients while backward is still running, so the
update is that of the whole batch. The average of the ranks' losses is the loss of the whole batch because the
parts are of one size; where they are not, see metrics.py.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from transformer import assert_same_losses, batches, loss_of, optimizer_of, transformer


def main() -> None:
    dist.init_process_group("unisono")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(transformer())
    optimizer, losses = optimizer_of(model), []
    for x, y in zip(*batches(), strict=True):
        loss = loss_of(model(x.chunk(size)[rank]), y.chunk(size)[rank])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = loss.detach().clone()  # a copy: the live loss stays as it is
        dist.all_reduce(average, dist.ReduceOp.AVG)
        losses.append(average.item())
    assert_same_losses(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
