"""Tensor parallelism: every rank has some of the attention heads and some of the hidden units of every block.

    unisono run -n 2 examples/tensor_parallel.py        (1, 2 or 4 ranks: there are 4 heads)

A linear layer split by columns gives each rank a part of the activations; one split by rows takes such a
part, and one all-reduce sums what the ranks got. All ranks see the whole batch; the losses are those of one
process.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from transformer import Block, assert_same_losses, batches, loss_of, optimizer_of, transformer

BY_COLUMNS = ("query", "key", "value", "mlp_in")
BY_ROWS = ("attention_out", "mlp_out")


def main() -> None:
    dist.init_process_group("unisono")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        **{name: ColwiseParallel() for name in BY_COLUMNS},
        **{name: RowwiseParallel() for name in BY_ROWS},
    }
    model = transformer()
    for block in model:
        if isinstance(block, Block):
            parallelize_module(block, mesh, plan)
            assert block.mlp_in.weight.to_local().shape[0] == block.mlp_in.weight.shape[0] / mesh.size()

    optimizer, losses = optimizer_of(model), []  # after parallelizing: the parameters are other objects now
    for x, y in zip(*batches(), strict=True):
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_same_losses(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
