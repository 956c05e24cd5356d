"""Two ranks of torch.distributed reduce tensors of different sizes; both print the error."""

import os

import torch
import torch.distributed as dist

import unisono.torch  # noqa: F401

rank = int(os.environ["RANK"])
dist.init_process_group("unisono", init_method=os.environ["MEETING"], rank=rank, world_size=2)
try:
    dist.all_reduce(torch.ones(2 + rank))  # here
except Exception as error:
    print(error)
dist.destroy_process_group()
