"""Step time and peak memory of `unisono.parallel` against DDP, FSDP2 and DeepSpeed's ZeRO, in the same run.

    python benchmarks/parallel.py --ranks 2 --model 10M
    python benchmarks/parallel.py --ranks 2 --model 10M --memory     peak memory of a rank, a job for each way

A way is one of `ddp`, `fsdp2`, `zero1` to `zero3` (DeepSpeed's, where it is installed), and `up0` to `up3`:
`up.Plan(data=ranks, zero=0..3)`. Every rank holds one model for each way, from the same parameters, and the
ways take turns; the ranks over Unisono and those over Gloo take turns, too, and sit still while the others
work. A step is forward, backward and AdamW; its time is that of its slowest rank. A figure is the median over
rounds of the round's median; a ratio is the median of the ratios within the rounds, to the fastest of the
other ways over Unisono. Before that all ways train a few steps, and their losses have to agree.

Memory is the most that a rank has held (VmHWM) in a few steps, less what it held before it had a model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from train import COMPARED_STEPS, HEAD_WIDTH, LAYERS, TOLERANCE, width_of

from unisono.bench import worker
from unisono.bench.measure import Timing, ratio
from unisono.bench.noise import CpuMeter, ticks_of
from unisono.bench.report import noise_line
from unisono.bench.side import Side

THEIRS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
OURS = ("up0", "up1", "up2", "up3")
SIDES = ("unisono-torch", "gloo")
LEARNING_RATE = 1e-3


# ---- a rank --------------------------------------------------------------------------------------------


class TrainingRank:
    """A joined rank, with a model for each way."""

    def __init__(self, command: dict[str, Any]) -> None:
        import torch

        from unisono.bench.contenders import join

        torch.set_num_threads(1)
        self.contender = join(command["side"], command["rank"], command["size"], command["address"])
        self.rank, self.size = command["rank"], command["size"]
        self.steps: dict[str, Any] = {}

    def obey(self, command: dict[str, Any]) -> tuple[dict[str, Any], NDArray[np.int64] | None]:
        """Make a model, train a few steps for their losses, or a block of steps for their times."""
        match command["do"]:
            case "bind":
                return self._bind(command), None
            case "losses":
                return {"losses": [self.step() for _ in range(command["steps"])]}, None
            case "way":
                self.step = self.steps[command["way"]]
                return {}, None
            case "peak":
                return {"peak": memory("VmHWM") - self.before}, None
            case "block":
                samples = worker.time_calls(self.step, command["calls"], command["warmup"], None)
                return {"samples": True}, samples
            case "close":
                self.contender.close()
                return {}, None
            case other:
                raise ValueError(f"unknown command {other!r}")

    def _bind(self, command: dict[str, Any]) -> dict[str, Any]:
        import torch

        from unisono.demo.model import GPT, VOCABULARY, ModelSize

        width, batch, context, way = (command[name] for name in ("width", "batch", "context", "way"))
        generator = torch.Generator().manual_seed(self.rank)
        tokens = torch.randint(VOCABULARY, (batch, context + 1), generator=generator)
        torch.manual_seed(0)
        self.before = memory("VmRSS")
        model = GPT(ModelSize(layers=LAYERS, width=width, heads=width // HEAD_WIDTH, context=context))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.step = self.steps[way] = stepper(model, way, self.size, tokens)
        return {"parameters": parameters}


def memory(name: str) -> int:
    """Bytes of this process, from a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def stepper(model: Any, way: str, ranks: int, tokens: Any) -> Any:
    """A function that trains one step and returns the loss before it."""
    import torch

    if way.startswith("up"):
        return ours(model, int(way[2:]), ranks, tokens)
    if way.startswith("zero"):
        return deepspeeds(model, int(way[4:]), tokens)
    model = pytorchs(model, way, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return mean(loss, ranks)

    return step


def mean(loss: Any, ranks: int) -> float:
    """The mean over all ranks, as from `Run.step`."""
    import torch.distributed as dist

    loss = loss.detach().double()
    dist.all_reduce(loss)
    return float(loss.item()) / ranks


def pytorchs(model: Any, way: str, ranks: int) -> Any:
    """`model` under DDP, or cut block by block by `fully_shard`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if way == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ours(model: Any, zero: int, ranks: int, tokens: Any) -> Any:
    """`model` under a plan of this project."""
    import torch

    import unisono.parallel as up

    run = up.parallelize(
        model,
        up.Plan(data=ranks, zero=zero),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        loss=lambda output, _: output,
    )
    return lambda: run.step((tokens, tokens))


def deepspeeds(model: Any, zero: int, tokens: Any) -> Any:
    """`model` under DeepSpeed, with PyTorch's AdamW."""
    import deepspeed
    import torch
    import torch.distributed as dist

    config = {
        "gradient_clipping": 0.0,  # its default clips to a norm of 1
        "train_micro_batch_size_per_gpu": len(tokens),
        "zero_optimization": {"stage": zero},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )

    def step() -> float:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return mean(loss, dist.get_world_size())

    return step


# ---- the command ---------------------------------------------------------------------------------------


def bind(side: Side, way: str, args: argparse.Namespace) -> int:
    """Make the model of a way on every rank; returns its number of parameters."""
    command = {"do": "bind", "way": way, "width": width_of(args.model), "batch": args.batch}
    answers = side.ask({**command, "context": args.context})
    return int(answers[0]["parameters"])


def compare(losses: dict[tuple[str, str], list[float]]) -> None:
    """All ways start from the same parameters, so their first losses agree."""
    first = next(iter(losses.values()))
    for (side, way), found in losses.items():
        if np.abs(np.subtract(found, first)).max() > TOLERANCE:
            raise SystemExit(f"{way} over {side}: losses {found}, expected {first}")


def measure(sides: list[Side], ways: list[str], args: argparse.Namespace) -> dict[tuple[str, str], Timing]:
    """Bind all ways, compare their losses, time `args.rounds` rounds."""
    losses = {}
    for side in sides:
        for way in ways:
            parameters = bind(side, way, args)
            answers = side.ask({"do": "losses", "steps": COMPARED_STEPS})
            losses[side.name, way] = answers[0]["losses"]
    compare(losses)
    print(
        f"# {parameters / 1e6:.1f} million parameters, {args.ranks} ranks, "
        f"{args.batch} x {args.context} bytes each"
    )
    timings = {(side.name, way): Timing(f"{way} over {side.name}") for side in sides for way in ways}
    for number in range(args.rounds):
        turns = list(timings)
        for name, way in turns if number % 2 == 0 else turns[::-1]:
            side = next(each for each in sides if each.name == name)
            side.ask({"do": "way", "way": way})
            timings[name, way].add(side.time_block(args.steps, warmup=1))
    return timings


def table(timings: dict[tuple[str, str], Timing], ways: list[str], sides: list[str]) -> list[dict[str, Any]]:
    """Print a line for each way; returns them as records."""
    theirs = [timings["unisono-torch", way] for way in ways if way in THEIRS]
    best = min(theirs, key=lambda timing: timing.p50_us) if theirs else None
    records = []
    for way in ways:
        record: dict[str, Any] = {"way": way}
        for side in sides:
            record[f"{side}_ms"] = timings[side, way].p50_us / 1e3
        if best is not None:
            record["to the best of them"] = ratio(timings["unisono-torch", way], best)
        if "gloo" in sides:
            record["to itself over Gloo"] = ratio(timings["unisono-torch", way], timings["gloo", way])
        records.append(record)
        print(
            "   ".join(
                f"{name} {value if name == 'way' else format(value, '8.3f')}"
                for name, value in record.items()
            )
        )
    return records


def peaks(ways: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the peak memory of a rank for each way; every way has its own processes."""
    records = []
    for way in ways:
        with Side("unisono-torch", args.ranks, (os.path.abspath(__file__), "--worker")) as side:
            parameters = bind(side, way, args)
            side.ask({"do": "losses", "steps": COMPARED_STEPS})
            peak = statistics.median(answer["peak"] for answer in side.ask({"do": "peak"}))
        records.append({"way": way, "peak_bytes": peak, "bytes_a_parameter": peak / parameters})
        print(f"{way:6} {peak / 1e6:8.1f} MB   {peak / parameters:5.1f} bytes a parameter", flush=True)
    return records


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    deepspeed = importlib.util.find_spec("deepspeed") is not None
    ways = [way for way in (*THEIRS, *OURS) if deepspeed or not way.startswith("zero")]
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--model", default="10M", help="parameters, about (default 10M)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step (default 2)")
    parser.add_argument("--context", type=int, default=64, help="bytes in a sequence (default 64)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way (default 7)")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn (default 5)")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"comma list of {', '.join(SIDES)}")
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of times")
    parser.add_argument("--json", metavar="FILE", help="also write a record")
    parser.add_argument("--ways", default=",".join(ways), help=f"comma list of {', '.join((*THEIRS, *OURS))}")
    args = parser.parse_args()
    chosen, names = args.ways.split(","), args.sides.split(",")
    if args.memory:
        records = peaks(chosen, args)
    else:
        with ExitStack() as stack:
            program = (os.path.abspath(__file__), "--worker")
            sides = [stack.enter_context(Side(name, args.ranks, program)) for name in names]
            meter = CpuMeter(ticks_of([pid for side in sides for pid in side.pids]))
            records = table(measure(sides, chosen, args), chosen, names)
            print(noise_line(meter.read(), len(os.sched_getaffinity(0))))
    if args.json:
        Path(args.json).write_text(
            json.dumps({"ranks": args.ranks, "model": args.model, "ways": records}, indent=1)
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(worker.main(sys.argv[2:], TrainingRank))
    main()
