"""One rank of the demo's PyTorch part: `unisono run -n 4 -m unisono.commands.demo.train_ddp`.

Plain PyTorch: DistributedDataParallel and AdamW. The backend is an argument, and nothing else differs between
a run over Unisono and one over Gloo. Rank 0 prints the progress, and writes the record.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unisono.commands.demo.corpus import read_corpus
from unisono.commands.demo.model import GPT

LEARNING_RATE, WARMUP_STEPS = 3e-3, 30
CORPUS_BYTES = 16 << 20
BATCH = 4  # sequences per rank and step
LINES = 12  # that report progress


def train(steps: int) -> dict[str, Any]:
    """Train; the losses and the seconds of each step, and a digest of the parameters, on this rank."""
    torch.manual_seed(0)
    model, rank = GPT(), dist.get_rank()
    text = torch.frombuffer(bytearray(read_corpus(CORPUS_BYTES)), dtype=torch.uint8)
    windows = text.unfold(0, model.context + 1, 1)
    chosen = torch.Generator().manual_seed(rank)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    warmed = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / (step + 1)))
    )
    losses, seconds = [], []
    for number in range(1, steps + 1):
        tokens = windows[torch.randint(len(windows), (BATCH,), generator=chosen)].long()
        begin = time.perf_counter()
        loss = parallel(tokens)
        loss.backward()
        optimizer.step()
        warmed.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        if rank == 0 and (number == 1 or number % -(-steps // LINES) == 0):
            took = f"{seconds[-1] * 1e3:.0f} ms a step"
            print(f"step {number:>4} of {steps}   loss {losses[-1]:.3f}   {took}", flush=True)
    bits = b"".join(parameter.detach().contiguous().numpy().tobytes() for parameter in model.parameters())
    return {"losses": losses, "seconds": seconds, "digest": hashlib.sha256(bits).hexdigest()}


def main() -> None:
    """Parse, join, train, leave."""
    parser = argparse.ArgumentParser(prog="python -m unisono.commands.demo.train_ddp")
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--record", metavar="FILE", help="losses, seconds and digests of all ranks as JSON")
    args = parser.parse_args()
    if args.backend == "unisono":
        import unisono.torch  # noqa: F401  (registers the backend)
    torch.set_num_threads(1)
    # At once: there is nothing to save. A callback would print an exception and go on.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    dist.init_process_group(args.backend)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, train(args.steps))
    if args.record and dist.get_rank() == 0:
        Path(args.record).write_text(json.dumps(found))
    dist.destroy_process_group()
    if args.backend == "gloo":  # its threads outlive the interpreter, and sometimes abort the process
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
