"""One rank of the demo's training run: `python -m unisono.demo.train`, started by a launcher.

Plain PyTorch: DistributedSampler, DistributedDataParallel, AdamW. The backend is an argument, and
nothing else differs between a run over Unisono and one over Gloo. Rank 0 reports on standard
output, one JSON object per line, for `unisono demo`.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from unisono.demo.communication import CommunicationClock
from unisono.demo.corpus import read_corpus
from unisono.demo.model import GPT, ModelSize, generate

__all__ = ["main"]

LEARNING_RATE = 3e-3
WARMUP_STEPS = 30
# Steps 2 to PILOT_STEPS are timed to decide how many fit. They are part of the learning rate's warm-up,
# which does not depend on the total.
PILOT_STEPS = 10
PROMPT = b"def "


class Blocks(Dataset[Tensor]):
    """The corpus cut into pieces of `length` + 1 bytes that overlap by one. Item: int64 [length + 1]."""

    def __init__(self, corpus: bytes, length: int) -> None:
        self.data = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index * self.length : (index + 1) * self.length + 1].long()


def learning_rate(step: int, total: int) -> float:
    """Linear warm-up, then half a cosine down to a twentieth.

    Example: step 14 of warm-up 30 -> half of LEARNING_RATE; the last step -> about 0.05 of it.
    """
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, total - WARMUP_STEPS)
    return LEARNING_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@dataclass
class Step:
    """The times and the loss of one step, on this rank."""

    loss: float
    step_s: float
    exposed_s: float
    in_flight_s: float
    nbytes: int


class Trainer:
    """The model, its data and its optimizer, on one rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.total: int = args.steps
        torch.manual_seed(args.seed)
        self.model = GPT(ModelSize())
        self.clock = CommunicationClock(self.world_size)
        self.parallel = DistributedDataParallel(self.model, gradient_as_bucket_view=True, bucket_cap_mb=1)
        # A lambda: DDP compares the hook's annotations with types, ours are strings.
        self.parallel.register_comm_hook(self.clock, lambda clock, bucket: clock.all_reduce(bucket))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        blocks = Blocks(read_corpus(args.corpus_bytes), self.model.context)
        self.sampler: DistributedSampler[Tensor] = DistributedSampler(
            blocks, shuffle=True, seed=args.seed, drop_last=True
        )
        self.loader = DataLoader(blocks, batch_size=args.batch, sampler=self.sampler, drop_last=True)
        self.tokens_per_step = args.batch * self.model.context * self.world_size

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def batches(self) -> Iterator[Tensor]:
        """This rank's batches, epoch after epoch."""
        for epoch in range(sys.maxsize):
            self.sampler.set_epoch(epoch)
            yield from self.loader

    def step(self, number: int, tokens: Tensor) -> Step:
        """One forward, backward and update."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.total)
        begin = time.perf_counter()
        self.clock.start_step()
        loss = self.parallel(tokens)
        loss.backward()
        exposed_s = self.clock.exposed_s(time.perf_counter())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        step_s = time.perf_counter() - begin
        return Step(loss.item(), step_s, exposed_s, self.clock.in_flight_s(), self.clock.nbytes)


def train(trainer: Trainer, args: argparse.Namespace) -> list[Step]:
    """Run the steps, or as many as fit into `args.seconds`; rank 0 reports each."""
    steps: list[Step] = []
    last = trainer.total
    begin = time.perf_counter()
    for number, tokens in enumerate(trainer.batches()):
        steps.append(trainer.step(number, tokens))
        if number + 1 == PILOT_STEPS < last:
            pilot_s = sum(step.step_s for step in steps[2:]) / (PILOT_STEPS - 2)
            last = agreed(min(last, max(PILOT_STEPS + 1, int(args.seconds / pilot_s))))
            if not args.fixed_schedule:
                trainer.total = last
        if trainer.rank == 0:
            elapsed_s = time.perf_counter() - begin
            report("step", step=number + 1, steps=last, elapsed_s=elapsed_s, **vars(steps[-1]))
        if number + 1 >= last:
            break
    return steps


def agreed(value: int) -> int:
    """Rank 0's value, on every rank."""
    box = torch.tensor([value])
    dist.broadcast(box, src=0)
    return int(box.item())


def mean_over_ranks(values: list[float]) -> list[float]:
    """Element by element. Shapes: [steps], the same on every rank."""
    mine = torch.tensor(values, dtype=torch.float64)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return cast("list[float]", torch.stack(everybody).mean(dim=0).tolist())


def parameter_digests(model: nn.Module) -> list[str]:
    """A hash over every bit of every parameter, for each rank."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return [bytes(one.tolist()).hex() for one in everybody]


def report(kind: str, **values: Any) -> None:
    """Write one record for the starting process."""
    print(json.dumps({"unisono_demo": kind, **values}), flush=True)


def run(args: argparse.Namespace) -> None:
    """Train, compare the ranks' parameters, write a sample."""
    trainer = Trainer(args)
    if trainer.rank == 0:
        report("start", parameters=trainer.parameters, tokens_per_step=trainer.tokens_per_step)
    steps = train(trainer, args)
    losses = mean_over_ranks([step.loss for step in steps])
    digests = parameter_digests(trainer.model)
    if trainer.rank == 0:
        sample = b""
        if args.sample_bytes:
            sample = generate(trainer.model, PROMPT, args.sample_bytes, temperature=0.6, seed=args.seed)
        report(
            "end", losses=losses, digests=digests, sample=sample.decode(errors="replace"), total=trainer.total
        )
    dist.barrier()


def main(argv: list[str] | None = None) -> int:
    """Parse, join, run, leave."""
    parser = argparse.ArgumentParser(prog="python -m unisono.demo.train")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument(
        "--fixed-schedule", action="store_true", help="an early stop does not change the learning rates"
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus-bytes", type=int, default=16 << 20)
    parser.add_argument("--sample-bytes", type=int, default=0)
    args = parser.parse_args(argv)
    if args.backend == "unisono":
        import unisono.torch  # noqa: F401  (registers the backend)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(args.backend)
        run(args)
        dist.destroy_process_group()
        if args.backend == "gloo":  # its threads outlive the interpreter, and sometimes abort the process
            sys.stdout.flush()
            os._exit(0)
    except KeyboardInterrupt:
        os._exit(130)  # at once: the starting process ends the job, there is nothing to save
    return 0


if __name__ == "__main__":
    sys.exit(main())
