"""Training with compressed gradients across hosts: seconds and bytes a step, and the loss at the end.

    python benchmarks/compressed_training.py --hosts 2 --steps 200 --json FILE
    python benchmarks/compressed_training.py --hosts 4 --ways none,low-rank,gloo-none
    python benchmarks/compressed_training.py --hosts 2 --matrix 4096        an all-reduce of one matrix
    python benchmarks/compressed_training.py --ways none,average-10,nesterov-10-int8 --shape 100mbit

Hosts are network namespaces of this machine, one rank on each, with links of --shape. Needs root. The model
is a byte-level GPT under DistributedDataParallel, on its text. Every way trains the same steps on the same
bytes from the same parameters. `loss` is the mean over text that no rank trains on, after the last step. A
step's time is the median over the steps after the start of compression, of the slowest rank; so is `CPU`, the
time of the rank's process on processors, which others on the machine change less; `sent` are the
bytes of such a step on the busiest host's link, headers included. Of ways that train on their own for 10
steps and then meet (nesterov-10: DiLoCo), the figures are means over all steps.

Uncompressed, a step sends 2(p-1)/p times the gradients through each link, each way.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from turns import HostWorkerGroup, TurnWorker, WorkerGroup, arguments, hosts, network, ranks_run, start, write

WAYS = ("none", "bf16", "int8", "low-rank", "gloo-none", "gloo-fp16", "gloo-low-rank")
MEETING = ("average", "nesterov")
ADAM: Any = {"betas": (0.9, 0.95), "weight_decay": 0.1}
LIMIT_S = 1500.0
EVALUATED, EVALUATED_ROWS = 8, 32
PEAK_RATE, WARMUP = 2e-3, 30
HELD_OUT = 1 << 18  # bytes at the end of the text
FIGURES = ("seconds", "cpu", "sent")


# ---- a rank --------------------------------------------------------------------------------------------


def rate(step: int, total: int) -> float:
    """Linear warm-up, then half a cosine down to a twentieth."""
    if step < WARMUP:
        return PEAK_RATE * (step + 1) / WARMUP
    share = (step - WARMUP) / max(1, total - WARMUP)
    return PEAK_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


def measured(call: Callable[[], object]) -> tuple[float, float, int]:
    """Seconds, CPU seconds, and bytes on this host's link, of a call of all ranks."""
    import torch.distributed as dist

    dist.barrier()
    sent, cpu, begin = bytes_sent(), time.process_time(), time.perf_counter()
    call()
    took = time.perf_counter() - begin, time.process_time() - cpu
    dist.barrier()
    return *took, bytes_sent() - sent


def bytes_sent() -> int:
    """The bytes on this host's link, including headers."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith(f"{hosts.INTERFACE}:"))


def compress(ddp: Any, way: str, rank: int, start: int, factors: str) -> Any:
    """Register the way's hook; returns Unisono's compression, if it is one."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    import unisono.parallel as up

    if way in ("bf16", "int8", "f169", "int4"):
        return up.Compressed(way, feedback=way != "bf16").attach(ddp)
    if way == "low-rank":
        return up.PowerSGD(rank=rank, start=start, factors=factors).attach(ddp)
    if way == "gloo-fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if way == "gloo-low-rank":
        options = {"matrix_approximation_rank": rank, "start_powerSGD_iter": max(2, start)}
        state = powerSGD_hook.PowerSGDState(None, orthogonalization_epsilon=1e-8, **options)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def trainer(model: Any, way: str, size: int) -> tuple[Callable[[Any], object], Any]:
    """A run whose replicas meet, for a way such as "nesterov-10-int8": its step, and its optimizer."""
    import torch

    import unisono.parallel as up

    outer, every, *codec = way.split("-")
    compression = up.Compressed(codec[0]) if codec else None
    plan = up.Plan(data=size, local_steps=int(every), outer=outer, compression=compression)
    run = up.parallelize(model, plan, optimizer=partial(torch.optim.AdamW, **ADAM), loss=lambda loss, _: loss)
    return lambda tokens: run.step((tokens, tokens)), run.optimizer


class CompressingRank(TurnWorker):
    """A rank that trains, or averages one matrix."""

    COMMANDS = (*TurnWorker.COMMANDS, "train", "average")

    def train(
        self, way: str, steps: int, batch: int, width: int, bucket_mb: float, **how: Any
    ) -> dict[str, Any]:
        """Train one model from the start."""
        import torch
        from gpt import GPT, source_text
        from torch.nn.parallel import DistributedDataParallel

        text = torch.frombuffer(bytearray(source_text(4 << 20)), dtype=torch.uint8).long()
        known, unknown = text[:-HELD_OUT], text[-HELD_OUT:]
        torch.manual_seed(0)
        model = GPT(width=width, heads=width // 32)
        length = model.context + 1

        def drawn(source: torch.Tensor, rows: int, seed: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed)
            starts = torch.randint(len(source) - length, (rows,), generator=generator)
            return torch.stack([source[first : first + length] for first in starts.tolist()])

        if way.startswith(MEETING):
            compression = None
            step, optimizer = trainer(model, way, self.size)
        else:
            # powerSGD_hook starts messages in callbacks: with several buckets ranks differ in their order,
            # and Gloo ends with "collective mismatch"
            cap = 1000 if way == "gloo-low-rank" else bucket_mb
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
            compression = compress(ddp, way, **how)
            optimizer = torch.optim.AdamW(model.parameters(), **ADAM)

            def step(tokens: torch.Tensor) -> None:
                ddp(tokens).backward()
                optimizer.step()
                optimizer.zero_grad()

        figures = []
        for number in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(number, steps)
            tokens = drawn(known, batch, number * self.size + self.rank)
            figures.append(measured(partial(step, tokens)))
        with torch.no_grad():
            losses = [model(drawn(unknown, EVALUATED_ROWS, 10**9 + n)).item() for n in range(EVALUATED)]
        return {
            **dict(zip(FIGURES, zip(*figures, strict=True), strict=True)),
            "loss": sum(losses) / len(losses),
            "parameters": sum(p.numel() for p in model.parameters()),
            "buffers": 0 if compression is None else compression.memory(),
        }

    def average(self, matrix: int, rounds: int, rank: int, factors: str) -> dict[str, Any]:
        """The mean of one matrix, exact and in low rank, in turns."""
        import torch
        import torch.distributed as dist

        import unisono.parallel as up

        parameter = torch.nn.Parameter(torch.zeros(matrix, matrix))
        generator = torch.Generator().manual_seed(self.rank)
        values = torch.randn(matrix, matrix, generator=generator)
        given = torch.empty_like(values)

        def low(compression: up.Compression) -> None:
            compression.begin([(parameter, given)], given.view(-1), label="matrix")
            compression.finish()

        calls: dict[str, Callable[[], object]] = {"exact": lambda: dist.all_reduce(given)}
        for feedback in (True, False):
            settings = up.PowerSGD(rank=rank, start=0, factors=factors, feedback=feedback)
            compression = up.Compression(settings, {"matrix": parameter}, dist.group.WORLD)
            calls["with feedback" if feedback else "without feedback"] = partial(low, compression)
        figures: dict[str, list[tuple[float, float, int]]] = {name: [] for name in calls}
        for number in range(rounds + 1):
            for name, call in calls.items():
                given.copy_(values)
                found = measured(call)
                figures[name] += [found] * bool(number)  # the first round warms up
        return {
            name: dict(zip(FIGURES, zip(*each, strict=True), strict=True)) for name, each in figures.items()
        }


# ---- the command ---------------------------------------------------------------------------------------


def worst(answers: list[dict[str, Any]], figure: str, skipped: int = 0) -> list[float]:
    """Of each step, the figure of the rank with the largest."""
    return [max(each) for each in zip(*(one[figure] for one in answers), strict=True)][skipped:]


def show_training(args: Any, sides: dict[str, WorkerGroup]) -> dict[str, Any]:
    """Train every way; a line for each."""
    print(
        f"# {args.hosts} hosts, links of {args.shape}, {args.steps} steps of {args.batch} x 128 bytes a rank"
    )
    keys = ("steps", "batch", "width", "rank", "start", "factors", "bucket_mb")
    found: dict[str, Any] = {}
    for way in args.ways.split(","):
        side = sides["gloo" if way.startswith("gloo") else "unisono-torch"]
        command = {"do": "train", "way": way, **{key: getattr(args, key) for key in keys}}
        answers = side.ask(command, timeout_s=LIMIT_S)
        middle = fmean if way.startswith(MEETING) else median
        seconds, cpu, sent = (middle(worst(answers, figure, args.start + 2)) for figure in FIGURES)
        losses = [one["loss"] for one in answers]
        found[way] = one = {"step_ms": 1e3 * seconds, "cpu_ms": 1e3 * cpu, "sent": sent}
        one |= {"loss": sum(losses) / len(losses), "same": len(set(losses)) == 1}
        one |= {name: answers[0][name] for name in ("parameters", "buffers")}
        first = next(iter(found.values()))
        print(
            f"{way:16} {one['step_ms']:8.1f} ms a step   {one['step_ms'] / first['step_ms']:5.2f}   "
            f"CPU {one['cpu_ms']:6.1f} ms   "
            f"{sent / 1e3:9.1f} kB sent   {sent / first['sent']:6.3f}   "
            f"loss {one['loss']:.4f}   {one['loss'] / first['loss'] - 1:+.2%}   "
            f"buffers {one['buffers'] / one['parameters']:.1f} bytes a parameter"
            + ("" if one["same"] else "   RANKS DIFFER"),
            flush=True,
        )
    return found


def show_matrix(args: Any, sides: dict[str, WorkerGroup]) -> dict[str, Any]:
    """One matrix: a line for each way, and the ratio to the exact one within a round."""
    keys = ("matrix", "rounds", "rank", "factors")
    command = {"do": "average", **{key: getattr(args, key) for key in keys}}
    answers = sides["unisono-torch"].ask(command, timeout_s=LIMIT_S)
    print(f"# {args.hosts} hosts, links of {args.shape}, {args.matrix} x {args.matrix}, rank {args.rank}")
    found: dict[str, Any] = {}
    exact = worst([answer["exact"] for answer in answers], "seconds")
    for name in answers[0]:
        mine = [answer[name] for answer in answers]
        seconds = worst(mine, "seconds")
        ratio = median(one / other for one, other in zip(seconds, exact, strict=True))
        cpu, sent = 1e3 * max(min(one["cpu"]) for one in mine), median(worst(mine, "sent"))
        found[name] = {"ms": 1e3 * median(seconds), "ratio": ratio, "sent": sent, "cpu_ms": cpu}
        times = f"{1e3 * median(seconds):9.1f} ms   {ratio:6.3f}   CPU {cpu:7.1f} ms"
        print(f"{name:18} {times}   {sent / 1e3:10.1f} kB sent")
    return found


def main() -> int:
    """Read the command line and measure."""
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--hosts", type=int, default=2)
    add("--shape", default="1gbit", metavar="RATE", help="rate of every link; empty: no limit")
    add("--steps", type=int, default=200)
    add("--start", type=int, default=WARMUP, help="steps before low rank begins (30)")
    add("--batch", type=int, default=4, help="sequences of 128 bytes a rank and step (4)")
    add("--width", type=int, default=160, help="of the model, a multiple of 32 (160: 1.4 million parameters)")
    add("--rank", type=int, default=4)
    add("--factors", default="bf16")
    add("--bucket-mb", type=float, default=1.0, help="of DDP")
    add("--ways", default=",".join(WAYS))
    add("--matrix", type=int, default=0, metavar="SIDE", help="instead of training, average one matrix")
    args = parser.parse_args()
    if reason := hosts.why_not():
        print(f"left out: {reason}", file=sys.stderr)
        return 1
    with network(args.hosts, args.shape) as (net, token), ExitStack() as stack:
        names = ["unisono-torch"] if args.matrix else ["unisono-torch", "gloo"]
        sides = {
            name: stack.enter_context(HostWorkerGroup(name, net, 1, token, worker=ranks_run(__file__)))
            for name in names
        }
        found = (show_matrix if args.matrix else show_training)(args, sides)
    write(args.json, {**vars(args), "found": found})
    return 0


if __name__ == "__main__":
    start(main, CompressingRank)
