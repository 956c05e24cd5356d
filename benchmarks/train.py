"""Step time of training a small transformer in several ways, over Unisono and over Gloo in the same run.

    python benchmarks/train.py --ranks 2 --model 10M
    python benchmarks/train.py --ranks 2 --model 10M --batch 1 --context 32        less computing per byte
    python benchmarks/train.py --ways ddp,fsdp2,up0,up1,up2,up3
    python benchmarks/train.py --ways ddp,up3 --memory     peak memory of a rank, a job for each way
    python benchmarks/train.py --ways ddp,fsdp2,tensor,sequence,pipeline --rows 1

A way is one of `ddp`, `fsdp2`, `zero1` to `zero3` (DeepSpeed's, where it is installed), `up0` to `up3`:
`up.Plan(data=ranks, zero=0..3)`, `tensor`: `up.Plan(tensor=ranks)`, `sequence`: the same with sequence=True,
and `pipeline`: `up.Plan(pipeline=ranks, micro_batches=rows)`. All train on the same rows. Where there are
fewer rows than ranks, ranks with the whole model have nothing to share: each trains on all rows.

Every rank holds one model for each way, from the same parameters, and the ways take turns over Unisono and
over Gloo. A step is forward, backward and AdamW. Before that all ways train a few steps, and their losses
have to agree. `to best`: the time over that of the fastest other way. `MB received`: by a rank in a step.

`alone` trains every rank by itself; `communication` is the share of a step that is not there then. `hidden`,
for DDP: how much of the time that the same all-reduces take by themselves does not show up in the step,
because backward goes on meanwhile: (alone + all-reduces - step) / all-reduces.

Memory is the most that a rank has held (VmHWM) in a few steps, less what it held before it had a model.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from turns import TurnWorker, WorkerGroup, arguments, ranks_run, start, started, take_turns, write

from unisono.commands.bench.measure import Timing, ratio

THEIRS, OURS = ("ddp", "fsdp2", "zero1", "zero2", "zero3"), ("up0", "up1", "up2", "up3")
SHARED = ("tensor", "sequence", "pipeline")  # ranks that share a model have the same rows
ALONE, REDUCTIONS = "alone", "all-reduces"
SIDES = ("unisono-torch", "gloo")
BUCKET_BYTES = 25 << 20  # DDP's
LAYERS, HEAD_WIDTH = 6, 32
COMPARED_STEPS = 3
TOLERANCE = 1e-4  # nats per byte, between ways; AVG and SUM-then-divide round differently
UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}
LEARNING_RATE = 1e-3


def width_of(model: str) -> int:
    """The width at which LAYERS blocks have about this number of parameters, 12 * width^2 each.

    Example: "10M" -> 384, of which the blocks have 10.6 million.
    """
    parameters = float(model[:-1]) * UNITS[model[-1]] if model[-1:] in UNITS else float(model)
    return max(1, round((parameters / (12 * LAYERS)) ** 0.5 / HEAD_WIDTH)) * HEAD_WIDTH


# ---- a rank --------------------------------------------------------------------------------------------


class TrainingRank(TurnWorker):
    """A joined rank, with a model for each way."""

    COMMANDS = (*TurnWorker.COMMANDS, "bind", "losses", "peak", "received")

    def bind(self, way: str, width: int, rows: int, context: int) -> dict[str, Any]:
        """Make the model of a way, and its step."""
        import torch
        from gpt import GPT, VOCABULARY

        torch.set_num_threads(1)
        tokens = torch.randint(VOCABULARY, (rows, context + 1), generator=torch.Generator().manual_seed(0))
        if way not in SHARED and rows >= self.size:
            tokens = tokens.chunk(self.size)[self.rank]
        torch.manual_seed(0)
        self.before = memory("VmRSS")
        model = GPT(LAYERS, width, width // HEAD_WIDTH, context)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        makers = {"up": ours, "zero": deepspeeds, REDUCTIONS: reductions, **dict.fromkeys(SHARED, ours)}
        self.ways[way] = makers.get(way.rstrip("0123"), pytorchs)(model, way, self.size, tokens)
        return {"parameters": parameters}

    def losses(self, way: str, steps: int) -> dict[str, Any]:
        """Train a few steps."""
        return {"losses": [self.ways[way]() for _ in range(steps)]}

    def received(self, way: str) -> dict[str, Any]:
        """The bytes that this rank receives in a step."""
        from unisono.parallel.step_trace import trace_step

        _, trace = trace_step(self.ways[way])
        return {"bytes": trace.received(self.size)}

    def peak(self) -> dict[str, Any]:
        """The memory of the model and of its steps."""
        return {"peak": memory("VmHWM") - self.before}


def memory(name: str) -> int:
    """Bytes of this process, from a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def mean(loss: Any, ranks: int) -> float:
    """The mean over all ranks, as from `Run.step`."""
    import torch.distributed as dist

    loss = loss.detach().double()
    dist.all_reduce(loss)
    return float(loss.item()) / ranks


def pytorchs(model: Any, way: str, ranks: int, tokens: Any) -> Callable[[], float]:
    """A step of `model` under DDP, cut block by block by `fully_shard`, or alone."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if way == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif way == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() if way == ALONE else mean(loss, ranks)

    return step


def reductions(model: Any, _way: str, _ranks: int, _tokens: Any) -> Callable[[], None]:
    """The all-reduces of DDP's reducer in a step, without computation."""
    import torch
    import torch.distributed as dist

    nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    whole, rest = divmod(nbytes, BUCKET_BYTES)
    buckets = [torch.zeros(each // 4) for each in [BUCKET_BYTES] * whole + [rest] * bool(rest)]

    def step() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()

    return step


def ours(model: Any, way: str, ranks: int, tokens: Any) -> Callable[[], float]:
    """A step of `model` under a plan of this project."""
    import torch

    import unisono.parallel as up

    plans = {
        "tensor": {"tensor": ranks},
        "sequence": {"tensor": ranks, "sequence": ranks > 1},
        "pipeline": {"pipeline": ranks, "micro_batches": len(tokens)},
    }
    run = up.parallelize(
        model,
        up.Plan(**plans.get(way) or {"data": ranks, "zero": int(way[2:])}),
        sample=tokens[:1] if way in SHARED else None,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        loss=lambda output, _: output,
    )
    return lambda: run.step((tokens, tokens))


def deepspeeds(model: Any, way: str, ranks: int, tokens: Any) -> Callable[[], float]:
    """A step of `model` under DeepSpeed, with PyTorch's AdamW."""
    import deepspeed
    import torch
    import torch.distributed as dist

    config = {
        "gradient_clipping": 0.0,  # its default clips to a norm of 1
        "train_micro_batch_size_per_gpu": len(tokens),
        "zero_optimization": {"stage": int(way[4:])},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    options = {"model": model, "optimizer": optimizer, "config": config, "dist_init_required": False}
    engine, *_ = deepspeed.initialize(**options)

    def step() -> float:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return mean(loss, ranks)

    return step


# ---- the command ---------------------------------------------------------------------------------------


def bind(side: WorkerGroup, way: str, args: Any) -> int:
    """Make the model of a way on every rank; returns its number of parameters."""
    rows = args.rows or args.batch * args.ranks
    command = {"do": "bind", "way": way, "width": width_of(args.model), "rows": rows}
    return int(side.ask({**command, "context": args.context})[0]["parameters"])


def measure(
    sides: list[WorkerGroup], ways: list[str], args: Any
) -> tuple[dict[tuple[str, str], Timing], dict[str, float]]:
    """Bind all ways, compare their losses, time the rounds.

    Returns:
        A timing for each (side, way), and the bytes that a rank of the first side receives in a step.
    """
    losses = {}
    for side in sides:
        for way in ways:
            parameters = bind(side, way, args)
            command = {"do": "losses", "way": way, "steps": COMPARED_STEPS}
            losses[f"{way} over {side.name}"] = side.ask(command)[0]["losses"]
    difference = max(float(np.abs(np.subtract(*pair)).max()) for pair in pairs(list(losses.values())))
    rows = args.rows or args.batch * args.ranks
    about = f"{args.ranks} ranks, {rows} x {args.context} bytes in all"
    print(f"# {parameters / 1e6:.1f} million parameters, {about}, losses differ by {difference:.1e}")
    if difference > TOLERANCE:
        raise SystemExit(f"the losses differ: {losses}")
    received = {
        way: max(answer["bytes"] for answer in sides[0].ask({"do": "received", "way": way})) for way in ways
    }
    turns = {(side.name, way): (side, way) for side in sides for way in ways}
    for way in (ALONE, REDUCTIONS):
        bind(sides[0], way, args)
        turns[sides[0].name, way] = (sides[0], way)
    return take_turns(turns, rounds=args.rounds, calls=args.steps), received


def pairs(found: list[Any]) -> list[tuple[Any, Any]]:
    """The first with each."""
    return [(found[0], each) for each in found]


def show(
    timings: dict[tuple[str, str], Timing], received: dict[str, float], ways: list[str], names: list[str]
) -> dict[str, Any]:
    """Print a line for each way; the same as a record."""
    own, records = names[0], {}
    alone, reduced = (timings[own, way].p50_us for way in (ALONE, REDUCTIONS))
    for way in ways:
        step = timings[own, way]
        found = {f"{name.removesuffix('-torch')} ms": timings[name, way].p50_us / 1e3 for name in names}
        if "gloo" in names[1:]:
            found["ratio"] = ratio(step, timings["gloo", way])
        others = [timings[own, each] for each in ways if each in THEIRS and each != way]
        if others:
            found["to best"] = ratio(step, min(others, key=lambda timing: timing.p50_us))
        found["communication"] = 1 - alone / step.p50_us
        if way == "ddp":
            found["hidden"] = min(1.0, max(0.0, (alone + reduced - step.p50_us) / reduced))
        found["MB received"] = received[way] / 1e6
        records[way] = found
        print(f"{way:8} " + "   ".join(f"{what} {value:8.3f}" for what, value in found.items()))
    print(f"alone {alone / 1e3:.1f} ms   all-reduces {reduced / 1e3:.1f} ms")
    return {**records, ALONE: {"ms": alone / 1e3}, REDUCTIONS: {"ms": reduced / 1e3}}


def peaks(ways: list[str], args: Any) -> dict[str, Any]:
    """Print the peak memory of a rank for each way; every way has its own processes."""
    records = {}
    for way in ways:
        with WorkerGroup("unisono-torch", args.ranks, ranks_run(__file__)) as side:
            parameters = bind(side, way, args)
            side.ask({"do": "losses", "way": way, "steps": COMPARED_STEPS})
            peak = statistics.median(answer["peak"] for answer in side.ask({"do": "peak"}))
        records[way] = {"peak_bytes": peak, "bytes_a_parameter": peak / parameters}
        print(f"{way:6} {peak / 1e6:8.1f} MB   {peak / parameters:5.1f} bytes a parameter", flush=True)
    return records


def main(words: list[str] | None = None) -> None:
    """Measure and print a table."""
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes (default 2)")
    add("--model", default="10M", help="parameters, about (default 10M)")
    add("--batch", type=int, default=2, help="sequences per rank and step (default 2)")
    add("--rows", type=int, help="sequences of all ranks and step, in place of --batch")
    add("--context", type=int, default=64, help="bytes in a sequence (default 64)")
    add("--steps", type=int, default=5, help="steps in a turn (default 5)")
    add("--sides", default=",".join(SIDES), help=f"comma list of {', '.join(SIDES)}")
    add("--memory", action="store_true", help="measure peak memory instead of times")
    add("--ways", default="ddp,fsdp2", help=f"comma list of {', '.join((*THEIRS, *OURS, *SHARED))}")
    args = parser.parse_args(words)
    ways, names = args.ways.split(","), args.sides.split(",")
    if args.memory:
        records = peaks(ways, args)
    else:
        sides = [WorkerGroup(name, args.ranks, ranks_run(__file__)) for name in names]
        with started(sides):
            records = show(*measure(sides, ways, args), ways, names)
    write(args.json, {"ranks": args.ranks, "model": args.model, "ways": records})


if __name__ == "__main__":
    start(main, TrainingRank)
