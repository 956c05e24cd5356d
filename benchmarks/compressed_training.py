"""Training with compressed gradients across hosts: seconds and bytes a step, and the loss at the end.

    python benchmarks/compressed_training.py --hosts 2 --steps 200 --json FILE
    python benchmarks/compressed_training.py --hosts 4 --ways none,low-rank,gloo-none
    python benchmarks/compressed_training.py --hosts 2 --matrix 4096        an all-reduce of one matrix

Hosts are network namespaces of this machine, one rank on each, with links of --shape. Needs root. The model
is the demo's GPT under DistributedDataParallel, on its text. Every way trains the same steps on the same
bytes from the same parameters. `loss` is the mean over text that no rank trains on, after the last step. A
step's time is the median over the steps after the start of compression, of the slowest rank; so is `CPU`, the
time of the rank's process on processors, which others on the machine change less; `sent` are the
bytes of such a step on the busiest host's link, headers included.

Uncompressed, a step sends 2(p-1)/p times the gradients through each link, each way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import hosts  # noqa: E402  (from tests/support)

WAYS = ("none", "bf16", "int8", "low-rank", "gloo-none", "gloo-fp16", "gloo-low-rank")
PORT = 29500
LIMIT_S = 1500
EVALUATED, EVALUATED_ROWS = 8, 32
PEAK_RATE, WARMUP = 2e-3, 30
HELD_OUT = 1 << 18  # bytes at the end of the text


# ---- a rank --------------------------------------------------------------------------------------------


def rate(step: int, total: int) -> float:
    """Linear warm-up, then half a cosine down to a twentieth."""
    if step < WARMUP:
        return PEAK_RATE * (step + 1) / WARMUP
    share = (step - WARMUP) / max(1, total - WARMUP)
    return PEAK_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


def compress(ddp: Any, way: str, order: dict[str, Any]) -> Any:
    """Register the way's hook; returns Unisono's compression, if it is one."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    import unisono.parallel as up

    if way in ("bf16", "int8", "f169", "int4"):
        return up.Compressed(way, feedback=way != "bf16").attach(ddp)
    if way == "low-rank":
        return up.PowerSGD(rank=order["rank"], start=order["start"], factors=order["factors"]).attach(ddp)
    if way == "gloo-fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if way == "gloo-low-rank":
        options = {"matrix_approximation_rank": order["rank"], "start_powerSGD_iter": max(2, order["start"])}
        state = powerSGD_hook.PowerSGDState(None, orthogonalization_epsilon=1e-8, **options)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def train(order: dict[str, Any]) -> dict[str, Any]:
    """This rank's part; returns its measurements."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from unisono.demo.corpus import read_corpus
    from unisono.demo.model import GPT, ModelSize

    rank, size, steps = dist.get_rank(), dist.get_world_size(), order["steps"]
    text = torch.frombuffer(bytearray(read_corpus(4 << 20)), dtype=torch.uint8).long()
    known, unknown = text[:-HELD_OUT], text[-HELD_OUT:]
    torch.manual_seed(0)
    model = GPT(ModelSize(width=order["width"], heads=order["width"] // 32))
    length = model.context + 1

    def batch(source: torch.Tensor, rows: int, seed: int) -> torch.Tensor:
        starts = torch.randint(len(source) - length, (rows,), generator=torch.Generator().manual_seed(seed))
        return torch.stack([source[start : start + length] for start in starts.tolist()])

    # powerSGD_hook starts messages in callbacks: with several buckets ranks differ in their order, and Gloo
    # ends with "collective mismatch"
    cap = 1000 if order["way"] == "gloo-low-rank" else order["bucket_mb"]
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    compression = compress(ddp, order["way"], order)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    seconds, sent, cpu = [], [], []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        tokens = batch(known, order["batch"], step * size + rank)
        dist.barrier()
        sent.append(bytes_sent())
        begin, cpu_begin = time.perf_counter(), time.process_time()
        ddp(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - cpu_begin)
    sent.append(bytes_sent())
    with torch.no_grad():
        losses = [model(batch(unknown, EVALUATED_ROWS, 10**9 + n)).item() for n in range(EVALUATED)]
    return {
        "loss": sum(losses) / len(losses),
        "seconds": seconds,
        "cpu": cpu,
        "sent": [after - before for before, after in itertools.pairwise(sent)],
        "parameters": sum(p.numel() for p in model.parameters()),
        "buffers": 0 if compression is None else compression.memory(),
    }


def matrix(order: dict[str, Any]) -> dict[str, Any]:
    """The mean of one matrix, exact and in low rank, in turns."""
    import torch
    import torch.distributed as dist

    import unisono.parallel as up

    side = order["matrix"]
    parameter = torch.nn.Parameter(torch.zeros(side, side))
    values = torch.randn(side, side, generator=torch.Generator().manual_seed(dist.get_rank()))
    given = torch.empty_like(values)

    def exact() -> None:
        dist.all_reduce(given)

    calls: dict[str, Callable[[], None]] = {"exact": exact}
    for feedback in (True, False):
        settings = up.PowerSGD(rank=order["rank"], start=0, factors=order["factors"], feedback=feedback)
        compression = up.Compression(settings, {"matrix": parameter}, dist.group.WORLD)

        def low(compression: up.Compression = compression) -> None:
            compression.begin([(parameter, given)], given.view(-1), label="matrix")
            compression.finish()

        calls["with feedback" if feedback else "without feedback"] = low
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    sent: dict[str, int] = {}
    for _ in range(order["rounds"] + 1):
        for name, call in calls.items():
            given.copy_(values)
            dist.barrier()
            before, begin, cpu_begin = bytes_sent(), time.perf_counter(), time.process_time()
            call()
            seconds[name].append(time.perf_counter() - begin)
            cpu[name].append(time.process_time() - cpu_begin)
            dist.barrier()
            sent[name] = bytes_sent() - before
    return {
        "seconds": {name: times[1:] for name, times in seconds.items()},
        "cpu": {name: min(times[1:]) for name, times in cpu.items()},
        "sent": sent,
    }


def bytes_sent() -> int:
    """The bytes on this host's link, including headers."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith(f"{hosts.INTERFACE}:"))


def work(order: dict[str, Any]) -> None:
    """Run one rank."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    place = {"rank": order["own_rank"], "world_size": order["size"], "timeout": timedelta(seconds=300)}
    backend = "gloo" if order["way"].startswith("gloo") else "unisono"
    dist.init_process_group(backend, init_method=f"tcp://{order['address']}:{PORT}", **place)
    found = matrix(order) if order["matrix"] else train(order)
    everyone: list[Any] = [None] * order["size"]
    dist.all_gather_object(everyone, found)
    if order["own_rank"] == 0:
        print(json.dumps(everyone), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# ---- the command ---------------------------------------------------------------------------------------


def run(net: hosts.Network, order: dict[str, Any], token: str) -> list[dict[str, Any]]:
    """Run a rank on each host; returns the measurements of each."""
    settings = [f"GLOO_SOCKET_IFNAME={hosts.INTERFACE}", f"UNISONO_TOKEN_FILE={token}", "OMP_NUM_THREADS=1"]
    argv = ["env", *settings, sys.executable, os.path.abspath(__file__), "--worker"]
    ranks = [
        node.start([*argv, json.dumps({**order, "own_rank": number})], stderr=None)
        for number, node in enumerate(net)
    ]
    try:
        printed, _ = ranks[0].communicate(timeout=LIMIT_S)
        for rank in ranks[1:]:
            rank.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{order['way']}: no end within {LIMIT_S} s") from None
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{order['way']}: a rank failed")
    found: list[dict[str, Any]] = json.loads(printed.splitlines()[-1])
    return found


def summed_up(measured: list[dict[str, Any]], start: int) -> dict[str, Any]:
    """Summarise the measurements of a way."""
    slowest = [max(times) for times in zip(*(one["seconds"] for one in measured), strict=True)][start + 2 :]
    sent = [max(each) for each in zip(*(one["sent"] for one in measured), strict=True)][start + 2 :]
    cpu = [max(each) for each in zip(*(one["cpu"] for one in measured), strict=True)][start + 2 :]
    return {
        "cpu_ms": 1e3 * sorted(cpu)[len(cpu) // 2],
        "step_ms": 1e3 * sorted(slowest)[len(slowest) // 2],
        "sent": sorted(sent)[len(sent) // 2],
        "loss": sum(one["loss"] for one in measured) / len(measured),
        "same": len({one["loss"] for one in measured}) == 1,
        "buffers": measured[0]["buffers"],
        "parameters": measured[0]["parameters"],
    }


def show_training(args: argparse.Namespace, net: hosts.Network, token: str) -> dict[str, Any]:
    """Train every way; a line for each."""
    print(
        f"# {args.hosts} hosts, links of {args.shape}, {args.steps} steps of {args.batch} x 128 bytes a rank"
    )
    found: dict[str, Any] = {}
    for way in args.ways.split(","):
        found[way] = one = summed_up(run(net, order_of(args, way, net), token), args.start)
        first = next(iter(found.values()))
        print(
            f"{way:14} {one['step_ms']:8.1f} ms a step   {one['step_ms'] / first['step_ms']:5.2f}   "
            f"CPU {one['cpu_ms']:6.1f} ms   "
            f"{one['sent'] / 1e3:9.1f} kB sent   {one['sent'] / first['sent']:6.3f}   "
            f"loss {one['loss']:.4f}   {one['loss'] / first['loss'] - 1:+.2%}   "
            f"buffers {one['buffers'] / one['parameters']:.1f} bytes a parameter"
            + ("" if one["same"] else "   RANKS DIFFER"),
            flush=True,
        )
    return found


def show_matrix(args: argparse.Namespace, net: hosts.Network, token: str) -> dict[str, Any]:
    """One matrix: a line for each way, and the ratio to the exact one within a round."""
    measured = run(net, order_of(args, "matrix", net), token)
    names = list(measured[0]["seconds"])
    slowest = {
        name: [max(each) for each in zip(*(one["seconds"][name] for one in measured), strict=True)]
        for name in names
    }
    found: dict[str, Any] = {}
    print(f"# {args.hosts} hosts, links of {args.shape}, {args.matrix} x {args.matrix}, rank {args.rank}")
    for name in names:
        ratios = sorted(t / e for t, e in zip(slowest[name], slowest["exact"], strict=True))
        middle = sorted(slowest[name])[len(slowest[name]) // 2]
        sent = max(one["sent"][name] for one in measured)
        cpu = 1e3 * max(one["cpu"][name] for one in measured)
        found[name] = {"ms": 1e3 * middle, "ratio": ratios[len(ratios) // 2], "sent": sent, "cpu_ms": cpu}
        print(
            f"{name:18} {1e3 * middle:9.1f} ms   {found[name]['ratio']:6.3f}   CPU {cpu:7.1f} ms   "
            f"{sent / 1e3:10.1f} kB sent"
        )
    return found


def order_of(args: argparse.Namespace, way: str, net: hosts.Network) -> dict[str, Any]:
    """The order for the ranks of a way."""
    keys = ("steps", "batch", "width", "rank", "start", "factors", "bucket_mb", "matrix", "rounds")
    return {key: getattr(args, key) for key in keys} | {
        "way": way,
        "size": args.hosts,
        "address": net[0].address,
    }


def main() -> int:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", type=int, default=2)
    add("--shape", default="1gbit", metavar="RATE", help="rate of every link; empty: no limit")
    add("--steps", type=int, default=200)
    add("--start", type=int, default=WARMUP, help="steps before low rank begins (30)")
    add("--batch", type=int, default=4, help="sequences of 128 bytes a rank and step (4)")
    add(
        "--width",
        type=int,
        default=160,
        help="width of the model, a multiple of 32 (160: 1.4 million parameters)",
    )
    add("--rank", type=int, default=4)
    add("--factors", default="bf16")
    add("--bucket-mb", type=float, default=1.0, help="of DDP")
    add("--ways", default=",".join(WAYS))
    add("--matrix", type=int, default=0, metavar="SIDE", help="instead of training, average one matrix")
    add("--rounds", type=int, default=7, help="with --matrix")
    add("--json", metavar="FILE", help="also write a record")
    args = parser.parse_args()
    if reason := hosts.why_not():
        print(f"left out: {reason}", file=sys.stderr)
        return 1
    with (
        tempfile.NamedTemporaryFile("w", prefix="token-") as token,
        hosts.hosts(args.hosts, rate=args.shape) as net,
    ):
        print(secrets.token_hex(), file=token, flush=True)
        show = show_matrix if args.matrix else show_training
        found = show(args, net, token.name)
    if args.json:
        Path(args.json).write_text(json.dumps({**vars(args), "found": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
        sys.exit(0)
    sys.exit(main())
