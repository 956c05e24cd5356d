"""Step time of training a small transformer, DDP and FSDP2, over Unisono and over Gloo in the same run, and
without any communication: every rank on its own.

    python benchmarks/train.py --ranks 2 --model 10M
    python benchmarks/train.py --ranks 2 --model 10M --batch 1 --context 32        less computing per byte

Each backend has its own processes, which sit still while the other's work. They take turns, round by round,
and who begins changes. A step is forward, backward and AdamW; its time is that of its slowest rank. A figure
is the median over rounds of the round's median; a ratio is the median of the ratios within the rounds. Before
that both backends train a few steps from the same parameters, and their losses have to agree.

`communication`: the share of a step that is not there when every rank trains on its own. `hidden`, for DDP:
how much of the time that the same all-reduces take by themselves does not show up in the step, because
backward goes on meanwhile: (own step + all-reduces - step) / all-reduces.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.bench import worker
from unisono.bench.measure import Timing, ratio
from unisono.bench.noise import CpuMeter, ticks_of
from unisono.bench.report import noise_line
from unisono.bench.side import Side

WAYS = ("ddp", "fsdp2")
ALONE = "alone"
BUCKET_BYTES = 25 << 20  # DDP's
LAYERS, HEAD_WIDTH = 6, 32
COMPARED_STEPS = 3
TOLERANCE = 1e-4  # nats per byte, between backends; AVG and SUM-then-divide round differently
UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}


def width_of(model: str) -> int:
    """The width at which LAYERS blocks have about this number of parameters, 12 * width^2 each.

    Example: "10M" -> 384, of which the blocks have 10.6 million.
    """
    parameters = float(model[:-1]) * UNITS[model[-1]] if model[-1:] in UNITS else float(model)
    return max(1, round((parameters / (12 * LAYERS)) ** 0.5 / HEAD_WIDTH)) * HEAD_WIDTH


# ---- a rank --------------------------------------------------------------------------------------------


class TrainingRank:
    """A joined rank, with its current model."""

    def __init__(self, command: dict[str, Any]) -> None:
        import torch

        from unisono.bench.contenders import Contender, join

        torch.set_num_threads(1)
        where = (command["side"], command["rank"], command["size"], command["address"])
        self.contender: Contender | None = None if command["side"] == ALONE else join(*where)
        self.rank = command["rank"]

    def obey(self, command: dict[str, Any]) -> tuple[dict[str, Any], NDArray[np.int64] | None]:
        """Make a model, train a few steps for their losses, or a block of steps for their times."""
        match command["do"]:
            case "bind":
                return {"parameters": self._bind(command)}, None
            case "losses":
                return {"losses": [self.step() for _ in range(command["steps"])]}, None
            case "block":
                samples = worker.time_calls(self.step, command["calls"], command["warmup"], None)
                return {"samples": True}, samples
            case "reductions":
                samples = worker.time_calls(self.reductions, command["calls"], command["warmup"], None)
                return {"samples": True}, samples
            case "close":
                if self.contender is not None:
                    self.contender.close()
                return {}, None
            case other:
                raise ValueError(f"unknown command {other!r}")

    def _bind(self, command: dict[str, Any]) -> int:
        import torch

        from unisono.demo.model import GPT, VOCABULARY, ModelSize

        width, batch, context = command["width"], command["batch"], command["context"]
        torch.manual_seed(0)
        model = GPT(ModelSize(layers=LAYERS, width=width, heads=width // HEAD_WIDTH, context=context))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.buckets = buckets_of(parameters)
        self.model = model if self.contender is None else wrapped(model, command["way"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(self.rank)
        self.tokens = torch.randint(VOCABULARY, (batch, context + 1), generator=generator)
        return parameters

    def step(self) -> float:
        """Train on this rank's tokens; returns the loss before it."""
        loss = self.model(self.tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def reductions(self) -> None:
        """The all-reduces of DDP's reducer in a step, without computation."""
        import torch.distributed as dist

        for work in [dist.all_reduce(bucket, async_op=True) for bucket in self.buckets]:
            work.wait()


def buckets_of(parameters: int) -> list[Any]:
    """Tensors with the sizes of DDP's buckets for this number of parameters."""
    import torch

    whole, rest = divmod(4 * parameters, BUCKET_BYTES)
    return [torch.zeros(nbytes // 4) for nbytes in [BUCKET_BYTES] * whole + [rest] * bool(rest)]


def wrapped(model: Any, way: str) -> Any:
    """`model` wrapped by one of WAYS."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if way == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# ---- the command ---------------------------------------------------------------------------------------


def measure(way: str, sides: list[Side], args: argparse.Namespace) -> dict[str, Timing]:
    """Bind, compare the losses, then time `args.rounds` rounds; a Timing for each side, and for the
    all-reduces of Unisono by themselves.
    """
    command = {"do": "bind", "way": way, "width": width_of(args.model), "batch": args.batch}
    losses = []
    for side in sides:
        bound = side.ask({**command, "context": args.context})
        if side.name == ALONE:
            continue
        answers = side.ask({"do": "losses", "steps": COMPARED_STEPS})
        losses.append([answer["losses"] for answer in answers])
    difference = float(np.abs(np.subtract(*losses)).max())
    print(
        f"# {way}: {bound[0]['parameters'] / 1e6:.1f} million parameters, losses differ by {difference:.1e}"
    )
    if difference > TOLERANCE:
        raise SystemExit(
            f"{way}: the losses over {' and '.join(side.name for side in sides)} differ: {losses}"
        )
    timings = {name: Timing(name) for name in (*(side.name for side in sides), "reductions")}
    for number in range(args.rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            timings[side.name].add(side.time_block(args.steps, warmup=1))
        timings["reductions"].add(sides[0].time_block(args.steps, warmup=1, what="reductions"))
    return timings


def shares(way: str, timings: dict[str, Timing]) -> dict[str, float]:
    """The share of communication in a step of each backend; under DDP the hidden share of the all-reduces."""
    alone, step = timings[ALONE].p50_us, timings["unisono-torch"].p50_us
    found = {f"communication {name}": 1 - alone / timings[name].p50_us for name in ("unisono-torch", "gloo")}
    if way == "ddp":
        reductions = timings["reductions"].p50_us
        found["hidden"] = min(1.0, max(0.0, (alone + reductions - step) / reductions))
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes per backend (default 2)")
    parser.add_argument("--model", default="10M", help="parameters, about (default 10M)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step (default 2)")
    parser.add_argument("--context", type=int, default=64, help="bytes in a sequence (default 64)")
    parser.add_argument("--rounds", type=int, default=7, help="turns per backend (default 7)")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn (default 5)")
    parser.add_argument("--json", metavar="FILE", help="also write a record")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"comma list of {', '.join(WAYS)}")
    args = parser.parse_args()
    ranks_run = (os.path.abspath(__file__), "--worker")
    with ExitStack() as stack:
        names = ("unisono-torch", "gloo", ALONE)
        sides = [stack.enter_context(Side(name, args.ranks, ranks_run)) for name in names]
        meter = CpuMeter(ticks_of([pid for side in sides for pid in side.pids]))
        print(f"# {args.ranks} ranks, {args.batch} x {args.context} bytes each, {args.rounds} rounds")
        record = {way: show(way, measure(way, sides, args)) for way in args.ways.split(",")}
        print(noise_line(meter.read(), len(os.sched_getaffinity(0))))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"ranks": args.ranks, "model": args.model, "ways": record}, file, indent=1)


def show(way: str, timings: dict[str, Timing]) -> dict[str, Any]:
    """Print a line and the shares; the same as a record."""
    own, gloo = timings["unisono-torch"], timings["gloo"]
    rounds = [ours / theirs for ours, theirs in zip(own.rounds, gloo.rounds, strict=True)]
    print(
        f"{way:6} unisono {own.p50_us / 1e3:8.1f} ms   gloo {gloo.p50_us / 1e3:8.1f} ms"
        f"   ratio {ratio(own, gloo):.3f}   by round " + " ".join(f"{each:.2f}" for each in rounds)
    )
    found = shares(way, timings)
    alone, reductions = timings[ALONE].p50_us / 1e3, timings["reductions"].p50_us / 1e3
    parts = "   ".join(f"{name} {share:.0%}" for name, share in found.items())
    print(f"{'':6} alone {alone:10.1f} ms   all-reduces {reductions:.1f} ms   {parts}", flush=True)
    times = {f"{name}_ms": timing.p50_us / 1e3 for name, timing in timings.items()}
    return {**times, "ratio": ratio(own, gloo), **found}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(worker.main(sys.argv[2:], TrainingRank))
    main()
