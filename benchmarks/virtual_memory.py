"""`unisono run --virtual-gpus 4 --no-poison benchmarks/virtual_memory.py KIND [TOKENS]`: GPT-2.

KIND is DDP, ZeRO-1 or FSDP2; AdamW in float32. What a GPU keeps between steps, and the peak of a step, by the
books of the virtual GPU, stand beside the formulas; they must agree within 5%. With P bytes of parameters on
N ranks:

    kept    DDP      parameters P, gradients P (views of DDP's buckets), moments 2 P          4 P
            ZeRO-1   the same, moments 2 P / N                                            2 P + 2 P / N
            FSDP2    all of it divided by N                                                  4 P / N

The word table of W bytes is the output layer, too. At the end of backward there are its two gradients and
their sum: 3 W. FSDP2 has also gathered the parameters outside of blocks (R bytes, W of them), whose gradients
it has not yet scattered, and keeps the last block's gradients (B bytes) until the next are scattered:

    peak    DDP, ZeRO-1   kept + 3 W
            FSDP2         kept + 3 W + R - R / N + B

That is with few tokens. Each adds 1.1 MiB of activations, which have gone by then. From about 300 tokens the
peak is where the loss goes back: kept + activations + twice the logits.
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


class GPT2(nn.Module):
    """124,439,808 parameters: the output layer shares the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options) for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
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
    for _ in range(2):  # the moments come with the first step
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        del logits
        loss.backward()
        del loss
        optimizer.step()
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


def formulas(kind: str, n: int) -> tuple[float, float]:
    """Return the bytes kept between steps and at the peak, on average over the ranks."""
    with torch.device("meta"):
        model = GPT2()
    block, whole = (4 * sum(x.numel() for x in part.parameters()) for part in (model.blocks[0], model))
    words, root = 4 * model.words.weight.numel(), whole - LAYERS * block
    kept = {"DDP": 4 * whole, "ZeRO-1": 2 * whole + 2 * whole / n, "FSDP2": 4 * whole / n}[kind]
    return kept, kept + 3 * words + (root - root / n + block if kind == "FSDP2" else 0)


def main() -> None:
    kind, tokens = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 64
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    n = dist.get_world_size()
    mine = torch.tensor(states(kind, tokens), dtype=torch.float64, device="cuda")
    dist.all_reduce(mine, op=dist.ReduceOp.AVG)  # ZeRO-1 gives whole parameters to ranks: they differ
    for what, seen, formula in zip(("kept", "peak"), mine.tolist(), formulas(kind, n), strict=True):
        if dist.get_rank() == 0:
            print(
                f"{kind} {what}: {seen / MIB:.0f} MiB, formula {formula / MIB:.0f}, {seen / formula - 1:+.1%}"
            )
        assert abs(seen / formula - 1) < 0.05
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
