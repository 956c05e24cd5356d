"""A model like Mixtral with its experts spread over ranks, or with all experts on each rank.

    unisono run -n 4 benchmarks/experts.py                     # all experts on each rank
    unisono run -n 4 benchmarks/experts.py --expert 4          # a quarter of them
    unisono run -n 4 benchmarks/experts.py --expert 4,1        # both, and how much faster the first one is
    (--zero 3 --width 256 --experts 8 --rows 2 --time 128 --precision bf16)

Every rank trains on its own rows. Prints the tokens per second of all ranks (from the median step), how much
the peak of a rank's resident memory is above what it had before the model was made, the bytes of parameters,
gradients and moments that a rank holds, and the last loss, which is the same for both. Of several plans only
the first one's peak counts.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up

WORDS = 512


class Experts(nn.Module):
    """Mixtral's: gated layers, stacked."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, inner) * inner**-0.5)

    def forward(self, rows: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """Add up each row's experts."""
        output = torch.zeros_like(rows)
        gates, downs = self.gate_up.unbind(0), self.down.unbind(0)  # one gradient for all experts
        for expert in range(self.num_experts):
            row, slot = torch.where(index == expert)
            gate, value = functional.linear(rows[row], gates[expert]).chunk(2, -1)
            made = functional.linear(functional.silu(gate) * value, downs[expert])
            output = output.index_add(0, row, made * weight[row, slot, None])
        return output


class Block(nn.Module):
    """Attention, and the two best experts of each token."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, 7 * width // 2, experts)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [rows, time, width]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        rows = self.norm2(x).flatten(0, 1)
        weight, index = self.gate(rows).softmax(-1).topk(2, -1)
        output: Tensor = x + self.experts(rows, index, weight / weight.sum(-1, keepdim=True)).view_as(x)
        return output


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def held(run: up.Run) -> int:
    """Bytes of parameters, gradients (as large) and moments on this rank."""
    sizes = [getattr(p, "to_local", lambda p=p: p)().nbytes for p in run.model.parameters()]
    return 4 * sum(sizes)


def trained(asked: argparse.Namespace, expert: int) -> tuple[float, float]:
    """Train by one plan, and print a line; return tokens per second and the last loss."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.manual_seed(0)
    blocks = [Block(asked.width, asked.experts) for _ in range(asked.layers)]
    model = nn.Sequential(
        nn.Embedding(WORDS, asked.width), *blocks, nn.RMSNorm(asked.width), nn.Linear(asked.width, WORDS)
    )
    plan = up.Plan(data=dist.get_world_size(), expert=expert, zero=asked.zero, precision=asked.precision)
    run = up.parallelize(
        model, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), loss=loss, check=False
    )
    tokens = torch.randint(WORDS, (asked.steps, asked.rows * plan.data, asked.time + 1))
    steps, value = [], 0.0
    for batch in run.shard([(one[:, :-1], one[:, 1:]) for one in tokens]):
        began = time.perf_counter()
        value = run.step(batch)
        steps.append(time.perf_counter() - began)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    most = torch.tensor([peak, held(run) / 2**20])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    rate = asked.rows * plan.data * asked.time / statistics.median(steps[1:])
    if dist.get_rank() == 0:
        print(
            f"{plan}: {rate:.0f} tokens/s; peak {most[0]:.0f} MiB; parameters, gradients and moments "
            f"{most[1]:.0f} MiB; last loss {value:.4f}",
            flush=True,
        )
    return rate, value


def main() -> None:
    """Train by one plan, or by several in turn."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    sizes = {"zero": 0, "width": 256, "experts": 8, "layers": 2, "rows": 2, "time": 128, "steps": 12}
    for name, number in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--expert", default="1", help="or several, such as 4,1")
    parser.add_argument("--precision", default="f32")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    found = [trained(asked, int(expert)) for expert in asked.expert.split(",")]
    if dist.get_rank() == 0 and len(found) > 1:
        (first, loss_of_first), (last, loss_of_last) = found[0], found[-1]
        far = abs(loss_of_first - loss_of_last)
        print(f"{first / last:.2f} times as many tokens/s; the last losses differ by {far:.1e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
