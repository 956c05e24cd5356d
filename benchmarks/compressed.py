"""All-reduce with and without codecs: between hosts, shaped and not, and in shared memory. Needs root.

    python benchmarks/compressed.py              2 and 4 hosts at 1 Gbit/s, 2 unshaped, 2 and 4 ranks of one
    python benchmarks/compressed.py --layouts 2@1gbit --mib 64 --rounds 5

Hosts are network namespaces of this machine, one rank each; a link has the rate in each direction (`tc tbf`).
The codecs take turns, call by call, on the same ranks. A figure is the median over rounds of the slowest
rank's time; `share` is the median over rounds of a round's time over that of `none` in the same round.
`error` is the largest difference to the sum in f64, `bound` what `Group.error_bound` promises; the bits of
the result are compared on all ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import unisono as un

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

CODECS = ("none", "bf16", "1-6-9", "int8", "int4")
LAYOUTS = ("2@1gbit", "4@1gbit", "2@", "2", "4")
TOKEN = "5" * 64


def contribution(rank: int, numel: int) -> np.ndarray:
    """Values like gradients: normally distributed."""
    return np.random.default_rng(rank).standard_normal(numel, np.float32)


def work(numel: int, rounds: int) -> None:
    """One rank. Rank 0 prints the measurements as JSON."""
    with un.init_process_group() as group:
        mine = contribution(group.rank, numel)
        exact = np.sum([contribution(rank, numel) for rank in range(group.size)], axis=0, dtype=np.float64)
        largest = np.array([np.abs(mine).max()])
        group.all_reduce(largest, un.MAX)
        found: dict[str, dict[str, Any]] = {codec: {"seconds": []} for codec in CODECS}
        for turn in range(rounds + 1):
            for codec, line in found.items():
                x, named = mine.copy(), None if codec == "none" else codec
                group.barrier()
                start = time.perf_counter()
                group.all_reduce(x, codec=named)
                took = np.array([time.perf_counter() - start])
                group.all_reduce(took, un.MAX)
                if turn:  # the first one warms up
                    line["seconds"].append(float(took[0]))
                    continue
                line["error"] = float(np.abs(x - exact).max())
                line["bound"] = (
                    0.0 if named is None else group.error_bound("all_reduce", float(largest[0]), named)
                )
                sums = group.all_gather(np.array([hash(x.tobytes())]))
                if group.rank == 0:
                    line["same"] = bool((sums == sums[0]).all())
        if group.rank == 0:
            print(json.dumps(found))


def ranks_of(size: int, words: list[str], places: list[Any], folder: str, address: str) -> str:
    """Run a rank on each place (a host, or None for this one); returns the output of rank 0."""
    started = []
    for rank, place in enumerate(places):
        settings = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": address,
            "MASTER_PORT": "29517",
            "UNISONO_TOKEN": TOKEN,
            "PYTHONHASHSEED": "0",
        }
        argv = ["env", *(f"{name}={value}" for name, value in settings.items()), sys.executable, *words]
        with Path(folder, f"rank{rank}").open("w") as errors:
            options = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
            begin = subprocess.Popen if place is None else place.start
            started.append(begin(argv, **options))
    outputs = [process.communicate()[0] for process in started]
    for rank, process in enumerate(started):
        if process.returncode:
            raise RuntimeError(f"rank {rank}: {Path(folder, f'rank{rank}').read_text()[-2000:]}")
    return outputs[0]


def measure(layout: str, numel: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure a layout. "4@1gbit": 4 hosts on links of that rate; "2@": unshaped; "2": ranks of this host."""
    count, at, rate = layout.partition("@")
    words = [str(Path(__file__).resolve()), "--work", str(numel), "--rounds", str(rounds)]
    with tempfile.TemporaryDirectory() as folder:
        if not at:
            return json.loads(ranks_of(int(count), words, [None] * int(count), folder, "127.0.0.1"))
        import hosts  # from tests/support: shared memory needs no namespaces

        with hosts.hosts(int(count), rate=rate) as net:
            return json.loads(ranks_of(int(count), words, list(net), folder, net[0].address))


def main() -> int:
    """Measure each layout and print a table for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--mib", type=int, default=64, help="of f32, on each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.rounds)
        return 0
    worst = 0
    for layout in args.layouts.split(","):
        count, at, rate = layout.partition("@")
        where = f"{count} hosts, {rate or 'unshaped'}" if at else f"{count} ranks of one host, shared memory"
        print(f"\nall_reduce of {args.mib} MiB f32, {where}, {args.rounds} rounds")
        print(f"  {'codec':8}{'ms':>9}{'share':>8}{'error':>11}{'bound':>11}  bits")
        found = measure(layout, args.mib << 18, args.rounds)
        base = found["none"]["seconds"]
        for codec, line in found.items():
            seconds = line["seconds"]
            share = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
            ms = statistics.median(seconds) * 1e3
            print(
                f"  {codec:8}{ms:9.1f}{share:8.3f}{line['error']:11.3g}{line['bound']:11.3g}"
                f"  {'the same' if line['same'] else 'DIFFER'}"
            )
            worst |= not line["same"] or (codec != "none" and line["error"] > line["bound"])
        sys.stdout.flush()
    return int(worst)


if __name__ == "__main__":
    sys.exit(main())
