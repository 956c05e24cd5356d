"""`unisono run --virtual-gpus 4 benchmarks/virtual_memory.py DDP|ZeRO-1|FSDP2`: GPT-2's memory.

AdamW in float32. What a GPU keeps between steps, by the books of the virtual GPU, stands beside the formula;
they must agree within 5%. The peak of a step adds what comes and goes within it. With P parameters of 4 bytes
on N ranks:

    DDP      parameters P, gradients P (views of DDP's buckets), moments 2P        16 P bytes
    ZeRO-1   the same, moments 2P/N                                                    8 P + 8 P/N bytes
    FSDP2    all of it divided by N                                                         16 P/N bytes
"""

from __future__ import annotations

import functools
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, HEADS, WORDS, LENGTH = 12, 768, 12, 50257, 1024
MIB = 1 << 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        x = x + self.out(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class GPT2(nn.Module):
    """124,439,808 parameters: the output layer shares the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.words.weight.t()


def states(kind: str, tokens: int) -> tuple[int, int]:
    """Return (bytes kept between steps, peak of a step) with `kind`."""
    torch.manual_seed(0)
    model: nn.Module = GPT2().cuda()
    make = functools.partial(torch.optim.AdamW, fused=True)
    if kind == "FSDP2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer: torch.optim.Optimizer = make(model.parameters())
    else:
        model = DistributedDataParallel(
            model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True
        )
        optimizer = (
            make(model.parameters())
            if kind == "DDP"
            else ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
        )
    ids = torch.randint(WORDS, (1, tokens), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        logits = model(ids)
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        del logits
        optimizer.step()
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    n = dist.get_world_size()
    with torch.device("meta"):
        p = 4 * sum(x.numel() for x in GPT2().parameters())
    formulas = {"DDP": 4 * p, "ZeRO-1": 2 * p + 2 * p // n, "FSDP2": 4 * p // n}
    kind = sys.argv[1] if len(sys.argv) > 1 else "DDP"
    kept, peak = states(kind, tokens=8)
    of_all: list[int] = [0] * n
    dist.all_gather_object(of_all, kept)
    mean = sum(of_all) / n  # ZeRO-1 gives whole parameters to ranks: they differ
    formula = formulas[kind]
    if dist.get_rank() == 0:
        print(
            f"{kind:8} kept {mean / MIB:.1f} MiB, formula {formula / MIB:.1f} MiB, {mean / formula - 1:+.1%};"
            f" peak of a step with 8 tokens {peak / MIB:7.1f} MiB"
        )
    assert abs(mean / formula - 1) < 0.05
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
