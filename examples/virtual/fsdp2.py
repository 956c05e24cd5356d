"""Sharded training as written for GPUs: fully_shard with mixed precision.

unisono run --virtual-gpus 4 examples/virtual/fsdp2.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)), nn.Linear(64, 1)
    ).cuda()
    whole = sum(p.numel() for p in model.parameters())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(32, 64, device="cuda")
    losses = []
    for _ in range(20):
        loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    mine = sum(p.to_local().numel() for p in model.parameters())
    if dist.get_rank() == 0:
        print(f"{mine} of {whole} parameters on each GPU, loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
