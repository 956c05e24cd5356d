"""Data parallel in one process by threads, beside processes: seconds of a step, alternating, medians.

    python benchmarks/one_process.py --parts 2

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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, ROWS, STEPS = 256, 12, 64, 30


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
    ]
    return nn.Sequential(*layers)


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


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


def alone() -> dict[str, float]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        one(net, batch())
        optimizer.step()

    return {"one process": timed(step)}


def threads(parts: int) -> dict[str, float]:
    net = model()
    replicas = [net, *(copy.deepcopy(net) for _ in range(parts - 1))]
    optimizer, serial = torch.optim.AdamW(net.parameters()), []

    with ThreadPoolExecutor(parts) as pool:

        def step() -> None:
            list(pool.map(one, replicas, batch().chunk(parts)))
            start = time.perf_counter()
            for first, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
                first.grad = (first.grad + sum(other.grad for other in others)) / parts
            optimizer.step()
            for replica in replicas[1:]:
                replica.load_state_dict(net.state_dict())
            serial.append(time.perf_counter() - start)

        total = timed(step)
    return {f"{parts} threads": total, "   of it gather, step, send": statistics.median(serial[5:])}


def processes(how: str) -> None:
    """Run one rank; rank 0 prints its figure."""
    dist.init_process_group("unisono")
    part = batch().chunk(dist.get_world_size())[0]
    if how == "ddp":
        net = DistributedDataParallel(model())
        optimizer = torch.optim.AdamW(net.parameters())

        def step() -> None:
            one(net, part)
            optimizer.step()
    else:
        import unisono.parallel as up

        plan = up.Plan(data=dist.get_world_size())
        run = up.parallelize(model(), plan, optimizer=torch.optim.AdamW, loss=functional.mse_loss)

        def step() -> None:
            run.step((part, part))

    seconds = timed(step)
    if dist.get_rank() == 0:
        print("RESULT" + json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def launched(how: str, parts: int) -> dict[str, float]:
    command = [sys.executable, "-m", "unisono", "run", "-n", str(parts), __file__, "--rank-of", how]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {f"{parts} processes, {how}": float(out.partition("RESULT")[2].split()[0])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank-of", choices=("ddp", "plan"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank_of:
        processes(options.rank_of)
        return
    rounds: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        found = {**alone(), **threads(options.parts)}
        found |= {**launched("plan", options.parts), **launched("ddp", options.parts)}
        for name, seconds in found.items():
            rounds.setdefault(name, []).append(seconds)
    base = statistics.median(rounds["one process"])
    for name, values in rounds.items():
        middle = statistics.median(values)
        print(f"{name:32} {middle * 1e3:8.2f} ms a step   {base / middle:5.2f} times one process")


if __name__ == "__main__":
    main()
