"""How the time of an all-reduce grows with the number of ranks on this machine, next to other libraries.

    python benchmarks/growth.py                                4 bytes and 16 MiB for 2, 4, 8, 16 and 32 ranks
    python benchmarks/growth.py --ranks 2 4 8 --against gloo,mpich --csv growth.csv --plot growth.png

Each point is a run of `unisono bench`, in which the sides take turns. With more ranks than cores they also
take turns at the cores: that is then what is measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

SIZES = ("4", "16M")
COLUMNS = ("ranks", "nbytes", "library", "p50_us", "p99_us", "ratio", "quiet")


def point(ranks: int, size: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each library."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "record.json")
        words = ["bench", "all_reduce", "-n", str(ranks), "-b", size, "-e", size, "--json", str(target)]
        words += ["--against", args.against, "--rounds", str(args.rounds), "--round-ms", str(args.round_ms)]
        done = subprocess.run(
            [sys.executable, "-m", "unisono", *words],
            stdout=subprocess.DEVNULL,
            timeout=args.timeout,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"unisono {' '.join(words)}: exit code {done.returncode}")
        record = json.loads(target.read_text())
    line = record["lines"][0]
    rest = {"ranks": ranks, "nbytes": line["nbytes"], "quiet": record["noise"]["quiet"]}
    figures = {"unisono": line, **line["peers"]}
    return [
        {**rest, "library": name, **{key: one.get(key, "") for key in ("p50_us", "p99_us", "ratio")}}
        for name, one in figures.items()
    ]


def draw(rows: list[dict[str, Any]], target: str) -> None:
    """Time over ranks, a panel for each size and a line for each library."""
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    sizes = sorted({row["nbytes"] for row in rows})
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(5 * len(sizes), 4), squeeze=False)
    for panel, nbytes in zip(panels[0], sizes, strict=True):
        for library in dict.fromkeys(row["library"] for row in rows):
            points = [
                row for row in rows if (row["nbytes"], row["library"]) == (nbytes, library) and row["p50_us"]
            ]
            style = "--k" if library == "limit" else "-o"
            panel.plot(
                [row["ranks"] for row in points], [row["p50_us"] for row in points], style, label=library
            )
        panel.set(title=f"all_reduce, {nbytes} bytes", xlabel="ranks", ylabel="microseconds")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.legend()
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    """Measure all points; print each row when it is done, then write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--against", default="gloo", help="comma list, as for `unisono bench`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=50.0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one point")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="needs unisono[plot]")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'ranks':>6} {'bytes':>10} {'library':>10} {'p50 us':>12} {'ratio':>8}")
    for size in args.sizes:
        for ranks in args.ranks:
            for row in point(ranks, size, args):
                rows.append(row)
                times = [f"{row[key]:.4g}" if row[key] != "" else "-" for key in ("p50_us", "ratio")]
                print(
                    f"{ranks:>6} {row['nbytes']:>10} {row['library']:>10} {times[0]:>12} {times[1]:>8}",
                    flush=True,
                )
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
