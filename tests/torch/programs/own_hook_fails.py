"""DDP with a communication hook of the user's; one rank fails. Run by test_torch_launch.py."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import unisono.torch  # noqa: F401


def hook(state, bucket):  # without annotations: DDP would compare their texts with its types
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


dist.init_process_group("unisono")
net = DistributedDataParallel(torch.nn.Linear(8, 8))
net.register_comm_hook(None, hook)
for step in range(10):
    if dist.get_rank() == 1 and step == 5:
        raise ValueError("bad loss")
    net(torch.ones(2, 8)).sum().backward()
