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

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from turns import (
    HostWorkerGroup,
    TurnWorker,
    WorkerGroup,
    arguments,
    network,
    ranks_run,
    start,
    take_turns,
    write,
)

from unisono.commands.bench.measure import ratio

CODECS = ("none", "bf16", "1-6-9", "int8", "int4")
LAYOUTS = ("2@1gbit", "4@1gbit", "2@", "2", "4")


def contribution(rank: int, numel: int) -> np.ndarray:
    """Values like gradients: normally distributed."""
    return np.random.default_rng(rank).standard_normal(numel, np.float32)


class CodecRank(TurnWorker):
    """A rank that reduces one array with each codec."""

    COMMANDS = (*TurnWorker.COMMANDS, "prepare", "check")

    def prepare(self, numel: int) -> dict[str, Any]:
        """Make the array, and the call of each codec."""
        self.mine = contribution(self.rank, numel)
        self.x = self.mine.copy()
        self.codecs = {name: None if name == "none" else name for name in CODECS}
        call = self.contender.group.all_reduce
        self.ways = {name: partial(call, self.x, codec=codec) for name, codec in self.codecs.items()}
        return {"largest": float(np.abs(self.mine).max())}

    def way(self, name: str) -> dict[str, Any]:
        """Choose a codec, restore the array, and meet the other ranks."""
        self.x[:] = self.mine
        self.contender.group.barrier()
        return super().way(name)

    def check(self, name: str, largest: float) -> dict[str, Any]:
        """The error of a result, what is promised, and a checksum of its bits."""
        self.way(name)
        self.call()
        exact = sum(contribution(rank, self.x.size).astype(np.float64) for rank in range(self.size))
        bound = self.contender.group.error_bound
        promised = 0.0 if name == "none" else bound("all_reduce", largest, self.codecs[name])
        found = {"difference": float(np.abs(self.x - exact).max()), "bound": promised}
        return found | {"bits": zlib.crc32(self.x.tobytes())}


@contextmanager
def side_of(layout: str) -> Iterator[WorkerGroup]:
    """The ranks of a layout. "4@1gbit": 4 hosts on links of that rate; "2@": unshaped; "2": of this host."""
    count, at, rate = layout.partition("@")
    if not at:
        with WorkerGroup("unisono", int(count), ranks_run(__file__)) as side:
            yield side
        return
    with (
        network(int(count), rate) as (net, token),
        HostWorkerGroup("unisono", net, 1, token, worker=ranks_run(__file__)) as side,
    ):
        yield side


def measure(layout: str, numel: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure a layout; a record for each codec."""
    with side_of(layout) as side:
        largest = max(answer["largest"] for answer in side.ask({"do": "prepare", "numel": numel}))
        checks = {name: side.ask({"do": "check", "name": name, "largest": largest}) for name in CODECS}
        turns = {name: (side, name) for name in CODECS}
        timings = take_turns(turns, rounds=rounds, calls=1, warmup=0)
    found = {}
    for name, answers in checks.items():
        found[name] = {
            "ms": timings[name].p50_us / 1e3,
            "share": ratio(timings[name], timings["none"]),
            "error": max(answer["difference"] for answer in answers),
            "bound": answers[0]["bound"],
            "same": len({answer["bits"] for answer in answers}) == 1,
        }
    return found


def main() -> int:
    """Measure each layout and print a table for it."""
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--mib", type=int, default=64, help="of f32, on each rank")
    args = parser.parse_args()
    records = {}
    for layout in args.layouts.split(","):
        count, at, rate = layout.partition("@")
        where = f"{count} hosts, {rate or 'unshaped'}" if at else f"{count} ranks of one host, shared memory"
        print(f"\nall_reduce of {args.mib} MiB f32, {where}, {args.rounds} rounds")
        print(f"  {'codec':8}{'ms':>9}{'share':>8}{'error':>11}{'bound':>11}  bits", flush=True)
        records[layout] = measure(layout, args.mib << 18, args.rounds)
        for codec, line in records[layout].items():
            figures = f"{line['ms']:9.1f}{line['share']:8.3f}{line['error']:11.3g}{line['bound']:11.3g}"
            print(f"  {codec:8}{figures}  {'the same' if line['same'] else 'DIFFER'}", flush=True)
    write(args.json, records)
    found = [(codec, line) for each in records.values() for codec, line in each.items()]
    return int(
        any(not one["same"] or (name != "none" and one["error"] > one["bound"]) for name, one in found)
    )


if __name__ == "__main__":
    start(main, CodecRank)
