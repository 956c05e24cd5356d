"""A GPT trained as DALL-E was: shards in a group of ranks, low-rank gradients between these groups, 16 bits.

    unisono run -n 4 examples/low_rank_shards.py [--steps 60] [--shard 2] [--zero 3]

Compute is in fp16, each block with a scale of its own; embedding and logits are sent exactly. Between
groups a matrix travels as two factors in 1-6-9, and what they leave out is sent later. Adam keeps its mean in
1-6-9 and its variance in 0-6-10. Beside it the same plan in f32, with AdamW and whole gradients.
Source: Ramesh et al., Zero-Shot Text-to-Image Generation, 2021 (arXiv:2102.12092), section 2.4, appendix.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import unisono.parallel as up
from transformer import BATCH, STEPS, batches, loss_of, transformer

CHOICES = {"0.*": "exact", "5.*": "exact", "*.weight": 4}  # of matrices: the first and the last layer, others
LOW = up.PowerSGD(rank=CHOICES, factors="1-6-9", errors="1-6-9", start=4)


def memory(run: up.Run) -> list[int]:
    """Bytes that a rank keeps between steps: Adam's moments, and what was not sent yet."""
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    parts = [value.to_local() if isinstance(value, DTensor) else value for value in states]
    return [
        sum(part.nbytes for part in parts if part.dim()),
        0 if run.compression is None else run.compression.memory(),
    ]


def train(name: str, plan: up.Plan, adam: type[torch.optim.Optimizer], steps: int) -> list[float]:
    run = up.parallelize(transformer(), plan, optimizer=lambda p: adam(p, lr=3e-3), loss=loss_of)
    (inputs, targets), losses = batches(), []
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        x, y = inputs[step % STEPS], targets[step % STEPS]
        losses.append(run.step((x[rank::size], y[rank::size]), watch=step == steps - 1))
    calls = [call for call in run.explain() if "gradients" in call.why]
    received = [sum(call.nbytes for call in calls if call.axis == axis) for axis in ("shard", "replica")]
    if rank == 0:
        texts = [f"{value:>9,.0f}" for value in (*received, *memory(run))]
        print(f"{name:9}", *texts, f"{losses[0]:8.4f} {losses[-1]:8.4f}  {run.skipped} skipped")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    for option, value in (("--steps", 60), ("--shard", 2), ("--zero", 3)):
        parser.add_argument(option, type=int, default=value)
    chosen = parser.parse_args()
    dist.init_process_group("unisono")
    assert BATCH % dist.get_world_size() == 0
    plain = up.Plan(data=dist.get_world_size(), zero=chosen.zero, shard=chosen.shard)
    low = up.Plan(
        data=plain.data, zero=plain.zero, shard=plain.shard, compression=LOW,
        precision="fp16", unit_scales=True, keep_f32=("norms",),
    )  # fmt: skip
    if dist.get_rank() == 0:
        print("bytes of a rank: gradients in a group, between groups; moments; unsent. First and last loss")
    wanted = train("plain", plain, torch.optim.AdamW, chosen.steps)
    found = train("all of it", low, up.CompressedAdam, chosen.steps)
    assert abs(sum(found[-8:]) / sum(wanted[-8:]) - 1) < 0.25
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
