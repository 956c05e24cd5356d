"""Two groups of nccl, made and destroyed."""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
dist.new_group([0, 1])
dist.destroy_process_group()
