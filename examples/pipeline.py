"""A pipeline: each rank has some consecutive layers; micro-batches flow through, activations are sent on.

    unisono run -n 2 examples/pipeline.py --schedule gpipe
    unisono run -n 4 examples/pipeline.py --schedule 1f1b

GPipe runs all micro-batches forward, then all backward, and keeps the activations of all. 1F1B begins with
backward as soon as it can, and keeps at most one per stage. Both give the losses of one process.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from transformer import assert_same_losses, batches, loss_of, optimizer_of, transformer

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MICRO_BATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    args = parser.parse_args()

    dist.init_process_group("unisono")
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = list(transformer())
    mine = nn.Sequential(*layers[len(layers) * rank // size : len(layers) * (rank + 1) // size])
    print(f"rank {rank}: {[type(layer).__name__ for layer in mine]}", flush=True)
    stage = PipelineStage(mine, rank, size, torch.device("cpu"))
    schedule = SCHEDULES[args.schedule](stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer, losses = optimizer_of(mine), []
    for x, y in zip(*batches(), strict=True):
        inputs = [x] if rank == 0 else []  # only the first stage is fed; the others receive
        targets, parts = (y, []) if rank == size - 1 else (None, None)  # only the last one knows the loss
        optimizer.zero_grad()
        schedule.step(*inputs, target=targets, losses=parts)
        optimizer.step()
        if parts:
            losses.append(torch.stack(parts).mean().item())
    if rank == size - 1:
        assert_same_losses(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
