"""The whole table of figures in one run of at most 12 minutes, on a machine that is otherwise quiet.

    python benchmarks/report.py                        writes benchmarks/results/<date>.json and .md
    python benchmarks/report.py --only decode,train-2 --minutes 4 --out /somewhere

Every part is a command of its own, which the record and the page name, and which can be run alone. Parts
for which no time is left are named as left out; a part that fails says so and the others go on. The machine
is calibrated first, for this run only; `all_reduce-2` is run twice, and the page says how far the two runs
differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from unisono.bench.contenders import LIMITS
from unisono.bench.peers import PEERS
from unisono.bench.report import machine

HERE = Path(__file__).resolve().parent
RECORD = "{record}"
AGREEMENT = 0.10
"""The largest difference of two successive runs on a quiet machine."""


@dataclass(frozen=True)
class Part:
    """One command. `seconds`: its approximate time. RECORD in its words: the file that it has to write."""

    name: str
    seconds: float
    words: tuple[str, ...]


def bench(name: str, seconds: float, line: str, against: str) -> Part:
    """A run of `unisono bench`."""
    words = ("-m", "unisono", "bench", *line.split(), "--against", against)
    return Part(name, seconds, (*words, "--json", RECORD))


def program(name: str, seconds: float, line: str) -> Part:
    """A run of another program in this folder."""
    file, *words = line.split()
    return Part(name, seconds, (str(HERE / file), *words, "--json", RECORD))


def parts() -> list[Part]:
    """The commands, the most important first, with the installed peers."""
    there = [peer.name for peer in PEERS.values() if peer.name not in LIMITS and peer.missing() is None]
    everybody, gloo = ",".join(there), "gloo" if "gloo" in there else ""
    sweep, brief = "all_reduce -n 2 -b 4 -e 64M -f 64 --rounds 5", "--rounds 5 --round-ms 25"
    return [
        Part("calibration", 5, ("-m", "unisono", "calibrate", "--refresh", "--json")),
        bench("all_reduce-2", 60, sweep, f"{everybody},memcpy"),
        bench("all_reduce-2-again", 60, sweep, f"{everybody},memcpy"),
        bench("torch-2", 30, f"{sweep} --interface torch", gloo),
        program("decode", 35, "decode.py --ranks 2"),
        program("train-2", 100, "train.py --ranks 2 --model 10M --rounds 5"),
        bench("operations-2", 110, f"all -n 2 -b 4 -e 16M -f 2048 {brief}", everybody),
        bench("all_reduce-4", 60, "all_reduce -n 4 -b 4 -e 64M -f 256 --rounds 5", everybody),
        program("train-4", 90, "train.py --ranks 4 --model 10M --rounds 3 --steps 3 --ways ddp"),
        Part("memory", 12, ("-m", "unisono", "run", "-n", "4", str(HERE / "memory.py"))),
        bench("sockets-2", 25, "all_reduce -n 2 -b 4 -e 16M -f 256 --rounds 5", gloo),
        program("growth", 120, f"growth.py --ranks 2 4 8 --rounds 3 --against {gloo or 'memcpy'}"),
    ]


# ---- running -------------------------------------------------------------------------------------------


def run(part: Part, environ: dict[str, str], limit_s: float) -> dict[str, Any]:
    """The record of one part, or the reason why there is none."""
    started = time.monotonic()
    environ = environ | ({"UNISONO_RANKS_PER_HOST": "1"} if part.name == "sockets-2" else {})
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        words = [word.replace(RECORD, str(record)) for word in part.words]
        found: dict[str, Any] = {
            "command": " ".join(["python", *part.words]).replace(f"{HERE}/", "benchmarks/")
        }
        try:
            done = subprocess.run(
                [sys.executable, *words],
                env=environ,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return found | {"error": f"not done within {limit_s:.0f} s"}
        found["seconds"] = round(time.monotonic() - started, 1)
        if done.returncode:
            return found | {"error": (done.stderr.strip() or done.stdout.strip())[-400:]}
        text = record.read_text() if record.exists() else done.stdout.partition("{")[2]
    return found | {"record": json.loads(text if text.lstrip()[:1] in "[{" else "{" + text)}


def run_all(chosen: list[Part], minutes: float) -> dict[str, dict[str, Any]]:
    """Run every part for which there is time."""
    deadline = time.monotonic() + 60 * minutes
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "UNISONO_CALIBRATION": str(Path(folder, "calibration.json"))}
        for part in chosen:
            left = deadline - time.monotonic()
            if left < part.seconds / 2:
                found[part.name] = {
                    "error": f"left out: {max(0, left):.0f} s were left of {minutes:g} minutes"
                }
            else:
                print(f"{part.name} (about {part.seconds:.0f} s) ...", flush=True)
                found[part.name] = run(part, environ, left)
            if "error" in found[part.name]:
                print(f"  {found[part.name]['error']}", flush=True)
    return found


# ---- the page ------------------------------------------------------------------------------------------


def agreement(first: dict[str, Any], second: dict[str, Any], figure: str) -> list[tuple[int, float]]:
    """(size, difference of a figure between two runs) for every size with that figure."""
    pairs = zip(first["lines"], second["lines"], strict=True)
    return [(one["nbytes"], abs(one[figure] / two[figure] - 1)) for one, two in pairs if one[figure]]


def agreements(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """The difference of two successive runs in words; and the pace of the cores in both, the cause."""
    for figure, words in (("p50_us", "times"), ("best_ratio", "ratios to the best peer")):
        differ = agreement(first, second, figure)
        if differ:
            size, worst = max(differ, key=lambda each: each[1])
            verdict = "within" if worst <= AGREEMENT else "NOT within"
            most = f"at most {worst:.1%} apart ({size} bytes)"
            yield f"Two runs in a row: {words} agree {verdict} {AGREEMENT:.0%}, {most}."
    paces = [run["noise"].get("pace") or {} for run in (first, second)]
    both = " and ".join(shown(pace.get("median_us")) for pace in paces)
    yield f"A fixed piece of work took {both} us in them."


def page(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    found = results["parts"]
    texts = [
        f"# Figures of {results['date']}",
        "",
        f"{results['machine']['cpu']}, {results['machine']['cores']} cores.",
    ]
    texts += ["Ratios are Unisono's time over the other's in the same run: below 1 Unisono is faster.", ""]
    both = [found.get(name, {}).get("record") for name in ("all_reduce-2", "all_reduce-2-again")]
    if all(both):
        texts += [*agreements(*both), ""]
    for name, part in found.items():
        texts += [f"## {name}", "", f"`{part.get('command', '')}`", ""]
        texts += (
            [f"No figures: {part['error']}"]
            if "error" in part
            else VIEWS.get(name, lines_view)(part["record"])
        )
        texts.append("")
    return "\n".join(texts)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def lines_view(record: dict[str, Any]) -> list[str]:
    """The view of a run of `unisono bench`."""
    peers = list(dict.fromkeys(name for line in record["lines"] for name in line["peers"]))
    head = [
        "operation",
        "bytes",
        "us",
        "p99",
        "algorithm",
        "predicted",
        *(f"over {peer}" for peer in peers),
        "to best",
    ]
    rows = []
    for line in record["lines"]:
        cells = [line["operation"], str(line["nbytes"]), f"{line['p50_us']:.4g}", f"{line['p99_us']:.4g}"]
        cells += [line["algorithm"] or "-", shown(line["predicted_us"])]
        cells += [shown(line["peers"][peer].get("ratio")) for peer in peers] + [shown(line["best_ratio"])]
        rows.append([f"{each}" for each in cells])
    noise = record["noise"]
    quiet = "quiet" if noise["quiet"] else "NOT QUIET"
    used, stolen = noise["others_cpu_share"] or 0, noise["stolen_cpu_share"] or 0
    shares = f"others used {used:.1%} of the cores, of it the host {stolen:.1%}"
    pace = noise.get("pace") or {}
    work = f"A fixed piece of work took {shown(pace.get('median_us'))} us on a core"
    span = f"mostly {shown(pace.get('low_us'))} to {shown(pace.get('high_us'))}"
    return [*table(head, rows), "", f"Machine {quiet}: {shares}. {work}, {span}."]


def decode_view(record: dict[str, Any]) -> list[str]:
    """The view of decode.py."""
    rows = [
        [name, f"{one['tokens_per_s']:.0f}", f"{one['communication']:.0%}", f"{one['time_over_gloo']:.3f}"]
        for name, one in record["sides"].items()
    ]
    return table(["side", "tokens/s", "communication", "time over Gloo's"], rows)


def train_view(record: dict[str, Any]) -> list[str]:
    """The view of train.py."""
    return table(
        ["way", "what", "value"],
        [[way, what, f"{value:.3g}"] for way, one in record["ways"].items() for what, value in one.items()],
    )


def growth_view(record: list[dict[str, Any]]) -> list[str]:
    """The view of growth.py."""
    keys = ("ranks", "nbytes", "library", "p50_us", "ratio")
    return table(list(keys), [[shown(row[key]) if row[key] != "" else "-" for key in keys] for row in record])


def flat_view(record: dict[str, Any]) -> list[str]:
    """The view of a record of numbers, and of records of numbers."""
    rows = [
        [
            name,
            ", ".join(f"{key} {shown(each)}" for key, each in one.items())
            if isinstance(one, dict)
            else shown(one),
        ]
        for name, one in record.items()
    ]
    return table(["what", "value"], rows)


def shown(value: object) -> str:
    """A number in four digits, whole ones whole, None as a dash."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


VIEWS: dict[str, Callable[[Any], list[str]]] = {
    "calibration": flat_view,
    "decode": decode_view,
    "train-2": train_view,
    "train-4": train_view,
    "memory": flat_view,
    "growth": growth_view,
}


def chosen_parts(only: str) -> Iterator[Part]:
    """Those named in a comma list, all without one."""
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {part.name for part in parts()}
    if unknown:
        raise SystemExit(
            f"no part {', '.join(sorted(unknown))}: there are {', '.join(p.name for p in parts())}"
        )
    yield from (part for part in parts() if not names or part.name in names)


def main() -> int:
    """Run, write, and say where. Exit code: 0, 1 when a part failed or was left out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="PARTS", help="comma list of parts")
    parser.add_argument("--minutes", type=float, default=12.0, help="for everything (default 12)")
    parser.add_argument("--out", default=str(HERE / "results"), metavar="FOLDER")
    args = parser.parse_args()
    now = datetime.now(timezone.utc)
    chosen = list(chosen_parts(args.only))
    found = run_all(chosen, args.minutes)
    about = machine() | {"cores": len(os.sched_getaffinity(0))}
    results = {"date": now.isoformat(timespec="seconds"), "machine": about, "parts": found}
    target = Path(args.out, now.strftime("%Y-%m-%d"))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    target.with_suffix(".md").write_text(page(results))
    print(f"written: {target}.json, {target}.md")
    return 1 if any("error" in part for part in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
