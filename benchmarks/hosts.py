"""all_reduce across hosts, Unisono against Gloo, on namespaces of this machine. Needs root and PyTorch.

    python benchmarks/hosts.py                         2x1, 2x2 and 4x2 ranks, unshaped links: ratios to Gloo
    python benchmarks/hosts.py --layout 4x1 --shape 1gbit --sizes 64M       share of the bound, bytes on links

Both libraries live in the same processes and take turns, round by round, so what disturbs the machine
disturbs both. A figure is the median over rounds of the slowest rank's time. The bound of an all-reduce of n
bytes among p hosts is 2(p-1)/p * n bytes through every host's link, each way. On a shaped link `share`
is what the bound alone would take divided by what it took; `link` is the bytes counted over the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
INTERFACE = "eth0"


def nbytes_of(text: str) -> int:
    """Read "64M"."""
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def bits_per_s(rate: str) -> float:
    """Read tc's "1gbit"."""
    unit = next(unit for unit in RATES if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * RATES[unit]


# ---- a rank --------------------------------------------------------------------------------------------


def counted() -> int:
    """Bytes this host's link has carried away from it."""
    with open("/proc/self/net/dev") as table:
        line = next(line for line in table if line.strip().startswith(f"{INTERFACE}:"))
    return int(line.split(":")[1].split()[8])


def rank_main(sizes: list[int], rounds: int) -> None:
    """Measure, and let rank 0 print one JSON line for each size."""
    import torch
    import torch.distributed as dist

    import unisono as un

    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    world = un.init_process_group(timeout=120)
    dist.init_process_group("gloo")
    for nbytes in sizes:
        x = torch.ones(max(1, nbytes // 4))
        calls = {"unisono": lambda x=x: world.all_reduce(x), "gloo": lambda x=x: dist.all_reduce(x)}
        repeats = max(1, min(50, (4 << 20) // nbytes))
        took: dict[str, list[float]] = {name: [] for name in calls}
        sent: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 1):
            for name, call in calls.items():
                dist.barrier()
                before, start = counted(), time.perf_counter()
                for _ in range(repeats):
                    call()
                slowest = torch.tensor([(time.perf_counter() - start) / repeats])
                carried = (counted() - before) / repeats
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if number:  # the first is for warming up
                    took[name].append(slowest.item())
                    sent[name].append(carried)
            x.fill_(1.0)
        if world.rank == 0:
            result = {"nbytes": nbytes, "seconds": {n: statistics.median(t) for n, t in took.items()}}
            print(
                json.dumps({**result, "sent": {n: statistics.median(s) for n, s in sent.items()}}), flush=True
            )
    dist.barrier()
    dist.destroy_process_group()
    world.close()


# ---- all hosts -----------------------------------------------------------------------------------------


def measure(layout: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start one launcher per host; what rank 0 printed."""
    import hosts

    count, per_host = (int(word) for word in layout.split("x"))
    with tempfile.TemporaryDirectory() as folder, hosts.hosts(count, rate=args.shape) as net:
        token = Path(folder, "token")
        rank = [__file__, "--rank", "--rounds", str(args.rounds), "--sizes", *args.sizes]
        launchers: list[subprocess.Popen[str]] = []
        for node in net:
            where = ["--nnodes", str(count), "--node-rank", str(node.number), "--master-addr", net[0].address]
            run = [sys.executable, "-m", "unisono", "run", *where, "--token-file", str(token)]
            argv = [*run, "-n", str(per_host), *rank]
            launchers.append(node.start(argv, stderr=None, stdout=subprocess.PIPE))
            hosts.wait_until(token.exists)
        output = [each.communicate(timeout=args.timeout)[0] for each in launchers]
        if any(each.returncode for each in launchers):
            raise SystemExit(f"{layout}: a rank failed")
    return [
        json.loads(line.split("] ", 1)[1]) for line in output[0].splitlines() if line.startswith("[rank 0] {")
    ]


def show(layout: str, results: list[dict[str, Any]], shape: str) -> None:
    """Print a table."""
    count = int(layout.split("x")[0])
    print(f"{layout} ranks{', links of ' + shape if shape else ''}")
    for one in results:
        ours, gloo = one["seconds"]["unisono"], one["seconds"]["gloo"]
        times = f"{ours * 1e6:>10.0f} us  Gloo {gloo * 1e6:>10.0f} us  ratio {ours / gloo:.2f}"
        line = f"  {one['nbytes']:>10} bytes  {times}"
        bound = 2 * (count - 1) / count * one["nbytes"]
        if shape:
            line += f"  share of the bound {bound * 8 / bits_per_s(shape) / ours:.0%}"
        print(line + f"  link {one['sent']['unisono'] / bound:.2f}", flush=True)


def main() -> int:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layout", action="append", metavar="HxR", help="hosts x ranks on each (2x1, 2x2, 4x2)"
    )
    parser.add_argument("--shape", default="", metavar="RATE", help="of every link, as 1gbit")
    parser.add_argument("--sizes", nargs="+", default=["4,4K,64K,1M,64M"], metavar="BYTES")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one layout")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.sizes = [size for word in args.sizes for size in word.split(",") if size]
    if args.rank:
        rank_main([nbytes_of(size) for size in args.sizes], args.rounds)
        return 0
    import hosts

    missing = hosts.why_not()
    if missing:
        print(f"left out: {missing}", file=sys.stderr)
        return 1
    for layout in args.layout or ["2x1", "2x2", "4x2"]:
        show(layout, measure(layout, args), args.shape)
    return 0


if __name__ == "__main__":
    sys.exit(main())
