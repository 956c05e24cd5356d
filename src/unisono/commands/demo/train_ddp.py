"""One rank of the demo's PyTorch part: `unisono run -n 4 -m unisono.commands.demo.train_ddp`.

Plain PyTorch: DistributedDataParallel and AdamW. The backend is an argument, and nothing
else differs between a run over Unisono and one over Gloo. Rank 0 prints the progress.
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

if __name__ == "__main__":
    # Before PyTorch, whose import takes seconds. At once: there is nothing to save. A callback would print an
    # exception and go on.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unisono.commands.demo.corpus import printable, read_corpus
from unisono.commands.demo.model import GPT, generate

__all__ = ["main"]

LEARNING_RATE, WARMUP_STEPS = 3e-3, 30
PILOT_STEPS = 10  # the last eight of them are timed to decide how many fit into --seconds
CORPUS_BYTES = 16 << 20
LINES = 12  # that report progress


def drawn(text: Tensor, length: int, batch: int, seed: int) -> Tensor:
    """Pieces of the text, at places that the seed chooses. Shapes: text [numel] -> [batch, length + 1]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (batch,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()


def learning_rate(step: int) -> float:
    """Linear warm-up, then falling with the root of the step. It does not depend on the number of steps.

    Example: step 14 of warm-up 30 -> half of LEARNING_RATE; step 119 -> half of it, too.
    """
    return LEARNING_RATE * min((step + 1) / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / (step + 1)))


def train(model: GPT, args: argparse.Namespace) -> dict[str, Any]:
    """Train `args.steps` steps, or as many as fit into `args.seconds`; the record of this rank."""
    text = torch.frombuffer(bytearray(read_corpus(CORPUS_BYTES)), dtype=torch.uint8)
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    last, losses, seconds, number = args.steps, [], [], 0
    while number < last:
        tokens = drawn(text, model.context, args.batch, args.seed * 1_000_003 + number * size + rank)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number)
        begin = time.perf_counter()
        loss = parallel(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        number += 1
        if number == PILOT_STEPS < last:
            fitting = int(args.seconds * (PILOT_STEPS - 2) / sum(seconds[2:]))
            last = gathered(min(last, max(PILOT_STEPS + 1, fitting)))[0]
            if last < args.steps:
                say(f"{last} of the {args.steps} steps fit into {args.seconds:g} s")
        if number == 1 or number % -(-last // LINES) == 0:
            say(f"step {number:>4} of {last}   loss {losses[-1]:.3f}   {seconds[-1] * 1e3:.0f} ms a step")
    return {"losses": losses, "seconds": seconds}


def gathered(value: Any) -> list[Any]:
    """The value of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def say(text: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def run(args: argparse.Namespace) -> None:
    """Train, compare the ranks' parameters, write a sample and the record."""
    torch.manual_seed(args.seed)
    model = GPT()
    numel = sum(parameter.numel() for parameter in model.parameters())
    nbytes = args.batch * model.context * dist.get_world_size()
    say(f"{numel / 1e6:.1f} million parameters, {nbytes} bytes of source text per step")
    mine = train(model, args)
    bits = b"".join(parameter.detach().contiguous().numpy().tobytes() for parameter in model.parameters())
    found = gathered({**mine, "digest": hashlib.sha256(bits).hexdigest()})
    if dist.get_rank() == 0:
        if args.sample_bytes:
            sample = generate(model, b"def ", args.sample_bytes, temperature=0.6, seed=args.seed)
            say(f"what the model writes, given 'def ':\n\n{printable(sample)}\n")
        means = [sum(each) / len(each) for each in zip(*(one["losses"] for one in found), strict=True)]
        digests = [one["digest"] for one in found]
        record = {"losses": means, "seconds": mine["seconds"], "digests": digests, "nbytes": 4 * numel}
        if args.record:
            Path(args.record).write_text(json.dumps(record))
    dist.barrier()


def main() -> int:
    """Parse, join, run, leave."""
    parser = argparse.ArgumentParser(prog="python -m unisono.commands.demo.train_ddp")
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample-bytes", type=int, default=0)
    parser.add_argument("--record", metavar="FILE", help="losses, seconds and digests as JSON")
    args = parser.parse_args()
    if args.backend == "unisono":
        import unisono.torch  # noqa: F401  (registers the backend)
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    run(args)
    dist.destroy_process_group()
    if args.backend == "gloo":  # its threads outlive the interpreter, and sometimes abort the process
        sys.stdout.flush()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
