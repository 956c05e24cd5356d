"""What all programs of run_gpu_programs.py share: the losses that they report."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist


def report(losses: list[float]) -> None:
    """Print the record that run_gpu_programs.py reads; `losses` of all ranks are averaged."""
    mean = torch.tensor(losses, device="cuda", dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("GPU_PROGRAM " + json.dumps(mean.tolist()), flush=True)
