"""A small GPT as many train it: torch.compile, DDP, float16 with a GradScaler, accumulated gradients.

It learns to continue sums such as "17+25=42". torchrun runs it unchanged on real GPUs.

unisono run --virtual-gpus 2 examples/virtual/nano_gpt.py
"""

import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

LETTERS = "0123456789+=\n"
LENGTH, WIDTH, HEADS, BLOCKS = 32, 64, 4, 2
STEPS, WARMUP, BATCH, MICRO_BATCHES, RATE = 30, 5, 16, 2, 3e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.before(x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        attended = scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.head.weight = self.letters.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(self.letters(x) + places)))
        return cross_entropy(logits.flatten(0, 1), y.flatten())


def text(sums: int = 4000) -> torch.Tensor:
    """The sums, one behind the other, as numbers of letters."""
    pairs = torch.randint(0, 50, (sums, 2), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor([LETTERS.index(each) for a, b in pairs for each in f"{a}+{b}={a + b}\n"])


def batch(data: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
    rows = torch.stack([data[i : i + LENGTH + 1] for i in starts.tolist()]).pin_memory()
    rows = rows.cuda(non_blocking=True)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def rate(step: int) -> float:
    """Rises for WARMUP steps, then falls as a cosine."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    return RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))))


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(1337)
    model = Gpt().cuda()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    replica = DistributedDataParallel(torch.compile(model), device_ids=[local_rank])
    data, generator = text(), torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        total = torch.zeros((), device="cuda")
        for micro_batch in range(MICRO_BATCHES):
            last = micro_batch == MICRO_BATCHES - 1
            with nullcontext() if last else replica.no_sync(), torch.autocast("cuda", dtype=torch.float16):
                loss = replica(*batch(data, generator)) / MICRO_BATCHES
                scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
    assert losses[-1] < 0.9 * losses[0], losses
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {torch.cuda.max_memory_allocated() >> 20} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
