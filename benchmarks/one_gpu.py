"""`python benchmarks/one_gpu.py [HARDWARE]`: steps of GPT-2's shapes on this GPU, beside `unisono plan`'s.

For each size: seconds of a step (the median of ten) and the peak of `torch.cuda.max_memory_allocated`, each
with the error of the plan. A plain loop: float32 parameters, autocast to bf16, fused attention and AdamW, a
loss that is not fused, dropout 0. HARDWARE: as `unisono plan` takes it; by default h100-80g.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono as un
from unisono.planner import shape_of

VOCAB, GIB = 50304, 1 << 30
# layers, width, heads, sequences of a step, tokens of each
SIZES = {
    "125M": (12, 768, 12, 16, 1024),
    "350M": (24, 1024, 16, 16, 1024),
    "760M": (24, 1536, 16, 8, 1024),
    "1.3B": (24, 2048, 16, 8, 1024),
    "1.3B, 2048": (24, 2048, 16, 4, 2048),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.after = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.after(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.words(ids) + self.places(places))))


def measured(layers: int, width: int, heads: int, rows: int, length: int) -> tuple[float, int]:
    """Seconds of a step, and its peak in bytes."""
    with torch.device("cuda"):
        model, ids = Gpt(layers, width, heads, length), torch.randint(VOCAB, (rows, length))
    optimizer, targets = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), ids.roll(-1, 1)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), torch.cuda.max_memory_allocated()


def main(hardware: str) -> None:
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, plans for {hardware}")
    for name, (layers, width, heads, rows, length) in SIZES.items():
        numbers = {"layers": layers, "hidden": width, "heads": heads, "vocab": VOCAB, "sequence": length}
        shape = shape_of("gpt", **numbers, dropout=False, attention="fused")
        plan = f"micro_batch={rows},zero=0"
        said = un.plan(shape, batch=rows, gpus=1, hardware=hardware, plan=plan, autocast=True).record()
        seconds, peak = measured(layers, width, heads, rows, length)
        time_error, memory_error = said["seconds"] / seconds - 1, said["memory_bytes"] / peak - 1
        print(
            f"{name:<11}{seconds * 1e3:>8.1f} ms, plan {time_error:>+6.1%}"
            f"{peak / GIB:>9.2f} GiB, plan {memory_error:>+6.1%}"
        )


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["h100-80g"]))
