"""Data-parallel training with PyTorch's own DDP over Unisono.

    unisono run -n 2 examples/ddp.py        (torchrun --nproc-per-node 2 examples/ddp.py works as well)

Each rank sees its share of the data; DDP averages the gradients while backward is still running.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unisono.torch  # noqa: F401  registers the backend "unisono"


def dataset(samples: int = 2048) -> TensorDataset:
    """Points of a smooth function: the same on every rank, so no file is needed."""
    x = torch.rand(samples, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1, keepdim=True) * 3).sin())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save", help="where rank 0 writes the parameters")
    args = parser.parse_args()

    dist.init_process_group("unisono")
    torch.manual_seed(dist.get_rank())  # DDP gives everybody rank 0's parameters
    net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    sampler = DistributedSampler(data := dataset())
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order each time
        for x, y in DataLoader(data, batch_size=64, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
        average = loss.detach().clone()  # a copy: averaging leaves the live tensor alone
        dist.all_reduce(average, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {average.item():.4f}", flush=True)
    if args.save and dist.get_rank() == 0:
        torch.save(net.module.state_dict(), args.save)
    dist.barrier()  # nobody goes on to load the file before it is there
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
