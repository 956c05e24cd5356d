"""Data parallel in one process by threads, beside processes: milliseconds of a step, in turns, medians.

    python benchmarks/one_process.py --parts 2
    python benchmarks/one_process.py --parts 2 --width 32 --layers 100 --rows 512    # many small operators

Prints a table: one process alone, threads as DataParallel has them, processes under up.Plan(data=N) and
under DDP; and what threads spend on gathering, stepping and sending parameters while all but one wait.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from turns import TurnWorker, WorkerGroup, arguments, ranks_run, start, started, take_turns, write

from unisono.commands.bench.measure import ratio

STEPS, WARMUP = 25, 5


class PartsRank(TurnWorker):
    """A rank of one of several processes, or the one process; all parts share the rows of a batch."""

    COMMANDS = (*TurnWorker.COMMANDS, "bind", "serial")

    def bind(self, width: int, layers: int, rows: int, parts: int) -> dict[str, Any]:
        """Make a model for each way: a step of AdamW on layers of a width."""
        import torch
        from torch import nn
        from torch.nn import functional
        from torch.nn.parallel import DistributedDataParallel

        import unisono.parallel as up

        torch.set_num_threads(1)

        def model() -> nn.Module:
            torch.manual_seed(0)
            made = [(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers)]
            return nn.Sequential(*(part for layer in made for part in layer))

        def one(replica: nn.Module, x: torch.Tensor) -> None:
            replica.zero_grad()
            functional.mse_loss(replica(x), x).backward()

        def stepper(net: nn.Module, x: torch.Tensor) -> Callable[[], None]:
            optimizer = torch.optim.AdamW(net.parameters())
            return lambda: (one(net, x), optimizer.step())

        batch = torch.randn(rows, width)
        if self.size > 1:
            part, plan = batch.chunk(parts)[0], up.Plan(data=parts)
            run = up.parallelize(model(), plan, optimizer=torch.optim.AdamW, loss=functional.mse_loss)
            ddp = stepper(DistributedDataParallel(model()), part)
            self.ways = {"plan": lambda: run.step((part, part)), "ddp": ddp}
            return {}
        replicas = [model() for _ in range(parts)]
        optimizer, pool = torch.optim.AdamW(replicas[0].parameters()), ThreadPoolExecutor(parts)
        self.serial_s: list[float] = []

        def threads() -> None:
            list(pool.map(one, replicas, batch.chunk(parts)))
            begin = time.perf_counter()
            for first, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
                first.grad = (first.grad + sum(other.grad for other in others)) / parts
            optimizer.step()
            for replica in replicas[1:]:
                replica.load_state_dict(replicas[0].state_dict())
            self.serial_s.append(time.perf_counter() - begin)

        self.ways = {"alone": stepper(copy.deepcopy(replicas[0]), batch), "threads": threads}
        return {}

    def serial(self) -> dict[str, Any]:
        """Seconds of a step of threads in which all but one wait."""
        return {"seconds": statistics.median(self.serial_s)}


def main() -> None:
    """Measure and print a table."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1024, help="rows of a batch, all parts together")
    args = parser.parse_args()
    parts, case = args.parts, {name: getattr(args, name) for name in ("width", "layers", "rows", "parts")}
    one, many = (WorkerGroup("unisono-torch", size, ranks_run(__file__)) for size in (1, parts))
    with started([one, many]):
        for side in (one, many):
            side.ask({"do": "bind", **case})
        turns = {"one process": (one, "alone"), f"{parts} threads": (one, "threads")}
        turns |= {f"{parts} processes, {way}": (many, way) for way in ("plan", "ddp")}
        timings = take_turns(turns, rounds=args.rounds, calls=STEPS, warmup=WARMUP)
        base, serial = timings["one process"], one.ask({"do": "serial"})[0]["seconds"]
        for name, timing in timings.items():
            times = f"{timing.p50_us / 1e3:8.2f} ms a step   {1 / ratio(timing, base):5.2f} times one process"
            print(f"{name:32} {times}")
        print(f"{'   of threads gather, step, send':32} {1e3 * serial:8.2f} ms a step")
    record = {name: timing.p50_us / 1e3 for name, timing in timings.items()}
    write(args.json, {**record, "gather, step, send": 1e3 * serial})


if __name__ == "__main__":
    start(main, PartsRank)
