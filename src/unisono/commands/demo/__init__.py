"""`unisono demo`: Unisono in a minute: training, a rank that dies, a benchmark; then PyTorch.

    train_numpy   one rank that trains in NumPy; then another rank is killed
    train_ddp     one rank that trains with PyTorch's DistributedDataParallel; model: its GPT
    corpus        the standard library's source text

This module is the command: it starts the ranks as `unisono run` does, and judges how they ended. It does not
import torch; the ranks do.
"""

from __future__ import annotations

import argparse
import csv
import json
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

from unisono.commands import launch
from unisono.commands.launch.job import job_from
from unisono.engine.environment import env

__all__ = ["add_arguments", "main"]

INSTALL_TORCH = "pip install torch"
BACKENDS = {"unisono": "Unisono", "gloo": "Gloo"}
EXIT_INTERRUPTED = 130
SAMPLE_BYTES = 600
SMOOTHED_STEPS, FEW_STEPS = 20, 10
BENCH = ["bench", "all_reduce", "-n", "2", "--against", "memcpy", "--no-limit"]
SIZES = {"4": "4 B", "256": "256 B", "16K": "16 KiB", "1M": "1 MiB", "64M": "64 MiB"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("-n", "--ranks", type=int, default=4, help="processes (default 4)")
    add("--only", choices=PARTS, help="one part: training in NumPy, the benchmark, PyTorch's DDP")
    add("--numpy-seconds", type=float, default=20.0, help="seconds of training in NumPy (default 20)")
    add("--steps", type=int, default=300, help="steps of DDP (default 300)")
    add("--seconds", type=float, default=50.0, help="of DDP at most: it then runs fewer steps (default 50)")
    add("--batch", type=int, default=4, help="sequences per rank and step of DDP (default 4)")
    add("--seed", type=int, default=0, help="seed of weights, data order and sample (default 0)")
    add("--backends", default="unisono,gloo", help="backends of DDP, one run each (default unisono,gloo)")


def main(args: argparse.Namespace) -> int:
    """Run the demo. Exit code: 0; 1: a run failed or ranks disagree; 2: wrong usage; 130: interrupted."""
    if complaint := complain(args):
        print(f"unisono demo: {complaint}", file=sys.stderr)
        return 2
    try:
        for part in [args.only] if args.only else PARTS:
            if fault := PARTS[part](args):
                print(f"unisono demo: {fault}")
                return 1
    except KeyboardInterrupt:
        print("unisono demo: interrupted, all ranks ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def complain(args: argparse.Namespace) -> str | None:
    """Return the fault of the arguments or the installation, in one line; None: there is none."""
    if args.only == "ddp" and find_spec("torch") is None:
        return f"this needs PyTorch: {INSTALL_TORCH}"
    unknown = [name for name in args.backends.split(",") if name.strip() not in BACKENDS]
    if unknown:
        return f"unknown backend {unknown[0]!r}: choose from {', '.join(BACKENDS)}"
    for name in ("ranks", "steps", "seconds", "batch", "numpy_seconds"):
        if getattr(args, name) <= 0:
            return f"--{name.replace('_', '-')} {getattr(args, name)}: must be positive"
    return None


def run_ranks(size: int, module: str, options: dict[str, Any], ends: Path) -> int:
    """`unisono run -n SIZE -m MODULE OPTIONS`, which writes how its ranks ended; returns its exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the job.
    """
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    words = [f"--{name}={value}" for name, value in options.items()]
    args = parser.parse_args(["-n", str(size), "--json-errors", str(ends), "-m", module, *words])
    environ = env.copy()
    environ.pop("UNISONO_REPLACE", None)  # "gloo" is to be Gloo here
    environ.setdefault("OMP_NUM_THREADS", "1")
    code = launch.run(job_from(args, environ)[0], environ)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return code


# ---- the parts: each returns its fault, "" if there is none --------------------------------------------


def show_numpy(args: argparse.Namespace) -> str:
    """Ranks train together; then one is killed, and the others report it."""
    n = args.ranks
    print(
        f"{n} ranks train a language model in NumPy; every step is one all_reduce of the gradient", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        ends = Path(folder, "ends.json")
        options = {"seconds": args.numpy_seconds, "seed": args.seed}
        run_ranks(n, "unisono.commands.demo.train_numpy", options, ends)
        codes = {one["rank"]: one["code"] for one in json.loads(ends.read_text())["ranks"]}
    return numpy_fault(n, codes)


def numpy_fault(size: int, codes: dict[int, int]) -> str:
    """ "" where the last rank was killed, and every other one named it and ended well."""
    expected = dict.fromkeys(range(size), 0) | ({size - 1: signal.SIGKILL} if size > 1 else {})
    return "" if codes == expected else f"the NumPy part failed: its ranks ended with {codes}"


def show_timing(_: argparse.Namespace) -> str:
    """The benchmark: all_reduce between two ranks against memcpy, a line for each size when it is done."""
    print("\nall_reduce of f32 between 2 ranks, against one memcpy of the same size per rank")
    print(f"    unisono {' '.join(BENCH)} -b 4 -e 64M -f 64")
    print(f"{'':>8}{'all_reduce':>14}{'memcpy':>14}{'wrong values':>14}", flush=True)
    for size, name in SIZES.items():
        words = [*BENCH, "-b", size, "-e", size, "--rounds", "3", "--format", "csv"]
        done = subprocess.run(
            [sys.executable, "-m", "unisono", *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            return f"the benchmark failed: {done.stderr}"
        own, memcpy = csv.DictReader(done.stdout.splitlines())
        times = "".join(f"{us_text(float(row['p50_us'])):>14}" for row in (own, memcpy))
        print(f"{name:>8}{times}{own['wrong']:>14}", flush=True)
    return ""


def us_text(us: float) -> str:
    """Example: 0.64 -> "0.6 us", 13982 -> "14.0 ms"."""
    return f"{us:.1f} us" if us < 100 else f"{us:.0f} us" if us < 1000 else f"{us / 1000:.1f} ms"


def show_ddp(args: argparse.Namespace) -> str:
    """Train with DDP once per backend on the same steps, then compare."""
    if find_spec("torch") is None:
        print(f"\nPyTorch is not installed: no DDP training here. With it: {INSTALL_TORCH}")
        return ""
    runs: dict[str, dict[str, Any]] = {}
    steps = args.steps
    for backend in (part.strip() for part in args.backends.split(",")):
        name = BACKENDS[backend]
        print(f"\n{name}: {args.ranks} ranks train a GPT with PyTorch's DDP", flush=True)
        options = {"backend": backend, "steps": steps, "sample-bytes": 0 if runs else SAMPLE_BYTES}
        options |= {"seconds": args.seconds, "batch": args.batch, "seed": args.seed}
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "record.json")
            options["record"] = record
            code = run_ranks(
                args.ranks, "unisono.commands.demo.train_ddp", options, Path(folder, "ends.json")
            )
            if code or not record.exists():
                return f"the run over {name} failed (exit code {code})"
            runs[name] = json.loads(record.read_text())
        steps = len(runs[name]["losses"])
    print(comparison(runs))
    name, first = next(iter(runs.items()))
    same = len(set(first["digests"])) == 1
    shown = " ".join(digest[:12] for digest in first["digests"][: 1 if same else None])
    verdict = f"{'bit-identical' if same else 'DIFFERENT'} on {len(first['digests'])} ranks, sha256 {shown}"
    print(f"parameters after training over {name}: {verdict}")
    return "" if same else "the ranks ended with different parameters"


PARTS = {"numpy": show_numpy, "timing": show_timing, "ddp": show_ddp}


def comparison(runs: dict[str, dict[str, Any]]) -> str:
    """The table at the end, one column per run, and the largest difference of the losses.

    Both runs have the same initial weights and the same data. The sums of the gradients differ in the last
    bit, because the ranks' contributions are added in another order, and training amplifies that.
    """
    common = min(len(run["losses"]) for run in runs.values())
    step_s = [
        median(run["seconds"][2:] or run["seconds"]) for run in runs.values()
    ]  # the first ones allocate
    nbytes = [run["nbytes"] for run in runs.values()]
    losses = [fmean(run["losses"][:common][-SMOOTHED_STEPS:]) for run in runs.values()]
    rows = {
        "": runs,
        "steps": [len(run["losses"]) for run in runs.values()],
        "step time, median": [f"{each * 1e3:.1f} ms" for each in step_s],
        "gradients reduced, per rank": [
            f"{n / s / 1e6:.1f} MB/s" for n, s in zip(nbytes, step_s, strict=True)
        ],
        f"loss after {common} steps, nats/byte": [f"{loss:.4f}" for loss in losses],
    }
    lines = [f"{head:<34}" + "".join(f"{cell:>20}" for cell in cells) for head, cells in rows.items()]
    if len(runs) > 1:
        names, both = list(runs), list(runs.values())
        gaps = [abs(a - b) for a, b in zip(both[0]["losses"], both[1]["losses"], strict=False)]
        few, worst = min(FEW_STEPS, len(gaps)), gaps.index(max(gaps))
        early = f"{max(gaps[:few]):.1e} in the first {few} steps"
        overall = f"{gaps[worst]:.1e} in all {len(gaps)} (at step {worst + 1})"
        lines += ["", f"largest difference in loss, {names[0]} to {names[1]}: {early}, {overall}"]
    return "\n".join(lines)
