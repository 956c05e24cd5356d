"""One group, tensors on the CPU and on CUDA devices. Run by suite.py."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono.torch  # noqa: F401
from unisono.torch_internals.version_names import all_gather_single


def main(rank: int, size: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        "unisono", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600)
    )
    on_cpu, on_cuda = torch.ones(4), torch.ones(4, device="cuda")
    dist.all_reduce(on_cpu)
    dist.all_reduce(on_cuda)
    assert torch.equal(on_cuda.cpu(), on_cpu)
    rows = torch.empty(size, 4, device="cuda")
    all_gather_single(rows, on_cuda)
    dist.broadcast(on_cuda, 0, async_op=True).wait()
    dist.barrier(device_ids=[rank])
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    part = dist.new_group(list(range(size)))
    dist.all_reduce(on_cuda, group=part)
    assert dist.group.WORLD._get_backend(torch.device("cuda")).name() == "nccl"
    net = DistributedDataParallel(nn.Linear(4, 4).cuda(), device_ids=[rank])
    net(torch.ones(2, 4, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    print("fine")
