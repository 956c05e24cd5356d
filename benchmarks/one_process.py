"""Data parallel in one process by threads, beside processes: seconds of a step, alternating, medians.

    python benchmarks/one_process.py --parts 2
    python benchmarks/one_process.py --parts 2 --width 32 --layers 100 --rows 512    # many small operators

Prints a table: one process alone, threads as DataParallel has them, processes under up.Plan(data=N) and
under DDP; and what threads spend on gathering, stepping and sending parameters while all but one wait.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

STEPS = 30


@dataclass(frozen=True)
class Case:
    """What is trained: layers of a width, on batches of rows that all parts share, by a number of parts."""

    width: int
    layers: int
    rows: int
    parts: int

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        width = self.width
        layers = [(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(self.layers)]
        return nn.Sequential(*(part for layer in layers for part in layer))

    def batch(self) -> torch.Tensor:
        return torch.randn(self.rows, self.width)

    def arguments(self) -> list[str]:
        return [f"--{name}={value}" for name, value in vars(self).items()]


def one(replica: nn.Module, x: torch.Tensor) -> None:
    replica.zero_grad()
    functional.mse_loss(replica(x), x).backward()


def timed(step: Any) -> float:
    """Median seconds of a step."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[5:])


def alone(case: Case) -> dict[str, float]:
    net = case.model()
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        one(net, case.batch())
        optimizer.step()

    return {"one process": timed(step)}


def threads(case: Case) -> dict[str, float]:
    net, parts = case.model(), case.parts
    replicas = [net, *(copy.deepcopy(net) for _ in range(parts - 1))]
    optimizer, serial = torch.optim.AdamW(net.parameters()), []

    with ThreadPoolExecutor(parts) as pool:

        def step() -> None:
            list(pool.map(one, replicas, case.batch().chunk(parts)))
            start = time.perf_counter()
            for first, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
                first.grad = (first.grad + sum(other.grad for other in others)) / parts
            optimizer.step()
            for replica in replicas[1:]:
                replica.load_state_dict(net.state_dict())
            serial.append(time.perf_counter() - start)

        total = timed(step)
    return {f"{parts} threads": total, "   of it gather, step, send": statistics.median(serial[5:])}


def rank_of(how: str, case: Case) -> None:
    """Run one rank; rank 0 prints its figure."""
    dist.init_process_group("unisono")
    part = case.batch().chunk(dist.get_world_size())[0]
    if how == "ddp":
        net = DistributedDataParallel(case.model())
        optimizer = torch.optim.AdamW(net.parameters())

        def step() -> None:
            one(net, part)
            optimizer.step()
    else:
        import unisono.parallel as up

        plan = up.Plan(data=dist.get_world_size())
        run = up.parallelize(case.model(), plan, optimizer=torch.optim.AdamW, loss=functional.mse_loss)

        def step() -> None:
            run.step((part, part))

    seconds = timed(step)
    if dist.get_rank() == 0:
        print("RESULT" + json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def processes(how: str, case: Case) -> dict[str, float]:
    command = [sys.executable, "-m", "unisono", "run", "-n", str(case.parts), __file__, "--rank-of", how]
    out = subprocess.run([*command, *case.arguments()], capture_output=True, text=True, check=True).stdout
    return {f"{case.parts} processes, {how}": float(out.partition("RESULT")[2].split()[0])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1024, help="rows of a batch, all parts together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank-of", choices=("ddp", "plan"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = Case(options.width, options.layers, options.rows, options.parts)
    if options.rank_of:
        rank_of(options.rank_of, case)
        return
    rounds: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        found = alone(case) | threads(case) | processes("plan", case) | processes("ddp", case)
        for name, seconds in found.items():
            rounds.setdefault(name, []).append(seconds)
    base = statistics.median(rounds["one process"])
    for name, values in rounds.items():
        middle = statistics.median(values)
        print(f"{name:32} {middle * 1e3:8.2f} ms a step   {base / middle:5.2f} times one process")


if __name__ == "__main__":
    main()
