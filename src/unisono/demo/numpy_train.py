"""One rank of the demo's NumPy part: `python -m unisono.demo.numpy_train`, started by a launcher.

Data-parallel training with one all-reduce per step; then the last rank kills itself, and the others report
their errors: one JSON object per line on standard output, for `unisono demo`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np

import unisono as un
from unisono.demo.corpus import read_corpus
from unisono.demo.numpy_model import CONTEXT, Adam, NextByte
from unisono.group import Group

__all__ = ["main"]

RATE = 3e-3
WARMUP_STEPS = 20
PILOT_STEPS = 10  # before the training: how many steps fit into the time?
PROMPT = b"def "
CALLS_BEFORE_THE_KILL = 100


def report(kind: str, **values: Any) -> None:
    """Write one record for the starting process."""
    print(json.dumps({"unisono_demo": kind, **values}), flush=True)


class Trainer:
    """The model, its data and its optimizer, on one rank."""

    def __init__(self, world: Group, args: argparse.Namespace) -> None:
        self.world, self.batch = world, args.batch
        self.data = np.frombuffer(read_corpus(args.corpus_bytes), np.uint8)
        self.windows = np.lib.stride_tricks.sliding_window_view(self.data, CONTEXT + 1)
        self.random = np.random.default_rng([args.seed, world.rank])
        self.model = NextByte(args.seed)
        self.adam = Adam(self.model.parameters.array)

    def step(self, rate: float) -> dict[str, float]:
        """One step: own gradient, its mean over the ranks, update."""
        begin = time.perf_counter()
        chosen = self.windows[self.random.integers(len(self.windows), size=self.batch)]
        loss = self.model.loss(chosen[:, :-1], chosen[:, -1])
        gradient = self.model.gradient.array
        before = time.perf_counter()
        self.world.all_reduce(gradient, un.AVG)
        reduced_s = time.perf_counter() - before
        self.adam.step(gradient, rate)
        step_s = time.perf_counter() - begin
        return {"loss": loss, "step_s": step_s, "exposed_s": reduced_s, "nbytes": gradient.nbytes}

    def steps_in(self, seconds: float) -> int:
        """The number of steps that fit, timed on rank 0, the same on every rank. Trains nothing."""
        begin = time.perf_counter()
        for _ in range(PILOT_STEPS):
            self.step(0.0)
        fitting = seconds * PILOT_STEPS / (time.perf_counter() - begin)
        return int(self.world.broadcast_object(max(PILOT_STEPS, int(fitting)), src=0))

    def train(self, total: int) -> list[float]:
        """Run the steps; rank 0 reports each. Linear warm-up, then linearly down."""
        losses = []
        for number in range(total):
            rate = RATE * min((number + 1) / WARMUP_STEPS, 1 - number / total)
            took = self.step(rate)
            losses.append(took["loss"])
            if self.world.rank == 0:
                report("step", step=number + 1, steps=total, in_flight_s=took["exposed_s"], **took)
        return losses

    def end(self, losses: list[float], args: argparse.Namespace) -> None:
        """Compare the ranks' parameters bit by bit, and write a sample."""
        mean = np.array(losses)
        self.world.all_reduce(mean, un.AVG)
        digest = hashlib.sha256(self.model.parameters.array.tobytes()).hexdigest()
        digests = self.world.all_gather_object(digest)
        if self.world.rank == 0:
            sample = self.model.generate(PROMPT, args.sample_bytes, temperature=0.8, seed=args.seed)
            text = sample.decode(errors="replace")
            report("end", losses=mean.tolist(), digests=digests, sample=text, total=len(losses))


def lose_a_rank(world: Group) -> None:
    """The last rank ends itself by SIGKILL; the others report the error of the call they were in."""
    x = np.ones(1000, np.float32)
    try:
        for _ in range(CALLS_BEFORE_THE_KILL):
            world.all_reduce(x, un.AVG)
        if world.rank == world.size - 1:
            report("killed", rank=world.rank, pid=os.getpid(), at=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        world.all_reduce(x, un.AVG)
    except un.PeerLost as error:
        report("lost", by=world.rank, rank=error.rank, text=str(error), at=time.monotonic())


def main(argv: list[str] | None = None) -> int:
    """Parse, join, run, leave."""
    parser = argparse.ArgumentParser(prog="python -m unisono.demo.numpy_train")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus-bytes", type=int, default=8 << 20)
    parser.add_argument("--sample-bytes", type=int, default=300)
    args = parser.parse_args(argv)
    try:
        with un.init_process_group() as world:
            trainer = Trainer(world, args)
            total = trainer.steps_in(args.seconds)
            if world.rank == 0:
                count = trainer.model.parameters.array.size
                report("start", parameters=count, tokens_per_step=args.batch * world.size)
            trainer.end(trainer.train(total), args)
            if world.size > 1:
                lose_a_rank(world)
    except KeyboardInterrupt:
        os._exit(130)  # at once: the starting process ends the job, there is nothing to save
    return 0


if __name__ == "__main__":
    sys.exit(main())
