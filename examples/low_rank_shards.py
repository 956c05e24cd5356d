"""A GPT trained as DALL-E was: shards within a group of ranks, and low-rank gradients between these groups.

    unisono run -n 4 examples/low_rank_shards.py [--steps 60] [--shard 2] [--zero 3]

Compute in fp16 with a scale for each block; embeddings, logits and norms exact or in f32. Between groups each
matrix travels as two factors in 1-6-9, and what they leave out is sent later. Adam keeps its mean in 1-6-9 and
its variance in 0-6-10. Beside it the same model under the same plan in f32, with AdamW and whole gradients.
Source: Ramesh et al., Zero-Shot Text-to-Image Generation, 2021 (arXiv:2102.12092), sections 2.4 and E.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import unisono.parallel as up
from transformer import BATCH, STEPS, batches, loss_of, transformer

RANK = 4
LOW = up.PowerSGD(
    rank={
        "0.*": "exact",
        "5.*": "exact",
        "*.weight": RANK,
    },  # the embedding, the logits; norms have no matrix
    factors="1-6-9",
    errors="1-6-9",
    start=4,
)


def run_of(plan: up.Plan, adam: type[torch.optim.Optimizer]) -> up.Run:
    return up.parallelize(transformer(), plan, optimizer=lambda p: adam(p, lr=3e-3), loss=loss_of)


def memory(run: up.Run) -> tuple[int, int]:
    """Bytes that a rank keeps between steps: Adam's moments, and what was not sent yet."""
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    tensors = [value.to_local() if hasattr(value, "to_local") else value for value in states]
    return sum(
        t.nbytes for t in tensors if t.dim()
    ), 0 if run.compression is None else run.compression.memory()


def train(name: str, run: up.Run, steps: int) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    (inputs, targets), losses = batches(), []
    for step in range(steps):
        x, y = inputs[step % STEPS], targets[step % STEPS]
        losses.append(run.step((x[rank::size], y[rank::size]), watch=step == steps - 1))
    gradients = {"shard": 0.0, "replica": 0.0}
    for call in run.explain():
        if "gradients" in call.why or "averaged" in call.why:
            gradients[call.axis] += call.nbytes
    moments, unsent = memory(run)
    if rank == 0:
        print(
            f"{name:8} {gradients['shard']:>12,.0f} {gradients['replica']:>12,.0f} {moments:>9,} {unsent:>9,} "
            f"{losses[0]:>7.4f} {losses[-1]:>7.4f}  {run.skipped} skipped"
        )
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    for option, value in (("--steps", 60), ("--shard", 2), ("--zero", 3)):
        parser.add_argument(option, type=int, default=value)
    chosen = parser.parse_args()
    dist.init_process_group("unisono")
    size = dist.get_world_size()
    assert BATCH % size == 0
    plain = up.Plan(data=size, zero=chosen.zero, shard=chosen.shard)
    low = up.Plan(
        data=size, zero=chosen.zero, shard=chosen.shard, compression=LOW,
        precision="fp16", unit_scales=True, keep_f32=("norms",),
    )  # fmt: skip
    if dist.get_rank() == 0:
        print(
            f"{low}\n\nbytes of a rank: gradients in its group, between groups; moments; unsent; first and last loss"
        )
    wanted = train("plain", run_of(plain, torch.optim.AdamW), chosen.steps)
    found = train("all of it", run_of(low, up.CompressedAdam), chosen.steps)
    assert abs(sum(found[-8:]) - sum(wanted[-8:])) < 0.25 * sum(wanted[-8:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
