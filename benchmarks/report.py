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
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from unisono.commands.bench.contenders import LIMITS
from unisono.commands.bench.libraries import PEERS
from unisono.commands.bench.report import machine

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
    ends = "-b 4 -e 16M -f 4194304 --rounds 3 --round-ms 50"
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
        *(bench(f"growth-{n}", 40, f"all_reduce -n {n} {ends}", gloo or "memcpy") for n in (2, 4, 8)),
    ]


# ---- running -------------------------------------------------------------------------------------------


def run(part: Part, environ: dict[str, str], limit_s: float) -> dict[str, Any]:
    """The record of one part, or the reason why there is none."""
    started = time.monotonic()
    environ = environ | ({"UNISONO_RANKS_PER_HOST": "1"} if part.name == "sockets-2" else {})
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        words = [word.replace(RECORD, str(record)) for word in part.words]
        command = " ".join(["python", *part.words]).replace(f"{HERE}/", "benchmarks/")
        found: dict[str, Any] = {"command": command}
        options = {"env": environ, "capture_output": True, "text": True, "timeout": limit_s}
        try:
            done = subprocess.run([sys.executable, *words], check=False, **options)
        except subprocess.TimeoutExpired:
            return found | {"error": f"not done within {limit_s:.0f} s"}
        found["seconds"] = round(time.monotonic() - started, 1)
        if done.returncode:
            return found | {"error": (done.stderr.strip() or done.stdout.strip())[-400:]}
        text = record.read_text() if record.exists() else done.stdout[done.stdout.index("{") :]
    return found | {"text": done.stdout.strip(), "record": json.loads(text)}


def run_all(chosen: list[Part], minutes: float) -> dict[str, dict[str, Any]]:
    """Run every part for which there is time."""
    deadline = time.monotonic() + 60 * minutes
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "UNISONO_CALIBRATION": str(Path(folder, "calibration.json"))}
        for part in chosen:
            left = deadline - time.monotonic()
            if left < part.seconds / 2:
                error = f"left out: {max(0, left):.0f} s were left of {minutes:g} minutes"
                found[part.name] = {"error": error}
            else:
                print(f"{part.name} (about {part.seconds:.0f} s) ...", flush=True)
                found[part.name] = run(part, environ, left)
            if "error" in found[part.name]:
                print(f"  {found[part.name]['error']}", flush=True)
    return found


# ---- the page ------------------------------------------------------------------------------------------


def agreements(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """The difference of two successive runs in words; and the pace of the cores in both, the cause."""
    for figure, words in (("p50_us", "times"), ("best_ratio", "ratios to the best peer")):
        pairs = zip(first["lines"], second["lines"], strict=True)
        differ = [(abs(one[figure] / two[figure] - 1), one["nbytes"]) for one, two in pairs if one[figure]]
        if differ:
            worst, size = max(differ)
            verdict = "within" if worst <= AGREEMENT else "NOT within"
            most = f"at most {worst:.1%} apart ({size} bytes)"
            yield f"Two runs in a row: {words} agree {verdict} {AGREEMENT:.0%}, {most}."
    paces = [(run["noise"].get("pace") or {}).get("median_us") for run in (first, second)]
    both = " and ".join("-" if pace is None else f"{pace:.4g}" for pace in paces)
    yield f"A fixed piece of work took {both} us in them."


def page(results: dict[str, Any]) -> str:
    """The results in Markdown: what each part printed."""
    found, machine = results["parts"], results["machine"]
    texts = [f"# Figures of {results['date']}", f"{machine['cpu']}, {machine['cores']} cores."]
    texts.append("Ratios are Unisono's time over the other's in the same run: below 1 Unisono is faster.")
    both = [found.get(name, {}).get("record") for name in ("all_reduce-2", "all_reduce-2-again")]
    if all(both):
        texts.append("\n".join(agreements(*both)))
    for name, part in found.items():
        texts += [f"## {name}", f"`{part.get('command', '')}`"]
        texts.append(f"No figures: {part['error']}" if "error" in part else f"```\n{part['text']}\n```")
    return "\n\n".join(texts) + "\n"


def chosen_parts(only: str) -> list[Part]:
    """Those named in a comma list, all without one."""
    known, names = {part.name: part for part in parts()}, [name for name in only.split(",") if name]
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"no part {', '.join(unknown)}: there are {', '.join(known)}")
    return [part for name, part in known.items() if not names or name in names]


def main() -> int:
    """Run, write, and say where. Exit code: 0, 1 when a part failed or was left out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="PARTS", help="comma list of parts")
    parser.add_argument("--minutes", type=float, default=12.0, help="for everything (default 12)")
    parser.add_argument("--out", default=str(HERE / "results"), metavar="FOLDER")
    args = parser.parse_args()
    now = datetime.now(timezone.utc)
    found = run_all(chosen_parts(args.only), args.minutes)
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
