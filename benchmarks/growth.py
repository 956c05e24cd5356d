"""How the time of an all-reduce grows with the number of ranks on this machine, next to other libraries.

    python benchmarks/growth.py                                4 bytes and 16 MiB for 2, 4, 8, 16 and 32 ranks
    python benchmarks/growth.py --ranks 2 4 8 --against gloo,mpich --csv growth.csv --plot growth.png

Each point is a run of `unisono bench`, in which the sides take turns. With more ranks than cores they also
take turns at the cores: that is then what is measured.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from turns import arguments, write

from unisono.commands.bench.report import Curves, draw_curves

COLUMNS = ("ranks", "nbytes", "library", "p50_us", "p99_us", "ratio", "quiet")


def point(ranks: int, size: str, args: Any) -> list[dict[str, Any]]:
    """One row for each library."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "record.json")
        words = ["bench", "all_reduce", "-n", str(ranks), "-b", size, "-e", size, "--json", str(target)]
        words += ["--against", args.against, "--rounds", str(args.rounds), "--round-ms", str(args.round_ms)]
        command = [sys.executable, "-m", "unisono", *words]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=args.timeout, check=False)
        if done.returncode:
            raise SystemExit(f"unisono {' '.join(words)}: exit code {done.returncode}")
        record = json.loads(target.read_text())
    (line,) = record["lines"]
    found = {"unisono": line, **line["peers"]}
    about = {"ranks": ranks, "nbytes": line["nbytes"], "quiet": record["noise"]["quiet"]}
    figures = ("p50_us", "p99_us", "ratio")
    return [
        {**about, "library": name, **{key: one.get(key, "") for key in figures}}
        for name, one in found.items()
    ]


def draw(rows: list[dict[str, Any]], target: str) -> None:
    """Time over ranks, a panel for each size and a line for each library."""
    panels: dict[str, Curves] = {}
    for row in (row for row in rows if row["p50_us"]):
        curves = panels.setdefault(f"all_reduce, {row['nbytes']} bytes", {})
        curves.setdefault(row["library"], []).append((row["ranks"], row["p50_us"]))
    draw_curves(panels, "ranks", target, base=2)


def main() -> None:
    """Measure all points; print each row when it is done, then write the files."""
    parser = arguments(__doc__, rounds=5)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    add("--sizes", nargs="+", default=("4", "16M"))
    add("--against", default="gloo", help="comma list, as for `unisono bench`")
    add("--round-ms", type=float, default=50.0)
    add("--timeout", type=float, default=600.0, help="seconds for one point")
    add("--csv", metavar="FILE")
    add("--plot", metavar="FILE", help="needs unisono[plot]")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'ranks':>6} {'bytes':>10} {'library':>10} {'p50 us':>12} {'ratio':>8}")
    for size in args.sizes:
        for ranks in args.ranks:
            for row in point(ranks, size, args):
                rows.append(row)
                us, ratio = (f"{row[key]:.4g}" if row[key] != "" else "-" for key in ("p50_us", "ratio"))
                print(f"{ranks:>6} {row['nbytes']:>10} {row['library']:>10} {us:>12} {ratio:>8}", flush=True)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    write(args.json, rows)
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
