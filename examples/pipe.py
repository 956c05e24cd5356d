"""A pipeline in two forms: over the devices of one process, and over processes. Same losses, same weights.

python examples/pipe.py                          one process: two GPUs, or threads on the CPU
UNISONO_VIRTUAL_GPUS=2 python examples/pipe.py   one process, two virtual GPUs
unisono run -n 2 examples/pipe.py                a process for each stage, also on several hosts
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import unisono.parallel as up
from transformer import assert_same_losses, batches, loss_of, optimizer_of, transformer

MICRO_BATCHES = 8


def on_devices() -> nn.Sequential:
    """The model; with GPUs its halves are on two of them."""
    model = transformer()
    if torch.cuda.device_count() > 1:
        model[:3].to("cuda:0")
        model[3:].to("cuda:1")
    return model


def in_one_process() -> None:
    model = up.Pipe(on_devices(), chunks=MICRO_BATCHES, balance=[3, 3])
    optimizer, losses = optimizer_of(model), []
    for x, y in zip(*batches(), strict=True):
        logits = model(x).local_value()
        loss = loss_of(logits, y.to(logits.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_same_losses(losses)
    print(model.timeline().text(60))
    transformer().load_state_dict(model.state_dict())  # the names are those of the nn.Sequential


def in_processes() -> None:
    dist.init_process_group("unisono")
    plan = up.Plan(pipeline=dist.get_world_size(), micro_batches=MICRO_BATCHES, schedule="gpipe")
    run = up.parallelize(
        transformer(), plan, optimizer=lambda params: torch.optim.SGD(params, 0.3, 0.9), loss=loss_of
    )
    losses = [run.step(batch) for batch in zip(*batches(), strict=True)]
    assert_same_losses(losses)
    with tempfile.TemporaryDirectory() as folder:  # in your program: one that all ranks can access
        names = [folder]
        dist.broadcast_object_list(names)  # rank 0's
        run.save(names[0])
    weights = run.state_dict()  # on rank 0; those of a Pipe have the same names
    if dist.get_rank() == 0:
        model = up.Pipe(transformer(), chunks=MICRO_BATCHES, balance=[3, 3])
        model.load_state_dict(weights)
        x, y = (part[0] for part in batches())
        print(f"the Pipe goes on with a loss of {loss_of(model(x).local_value(), y).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    in_one_process() if int(os.environ.get("WORLD_SIZE", "1")) == 1 else in_processes()
