"""`unisono demo`: Unisono in a minute: training, a rank that dies, a benchmark; then PyTorch.

    train_numpy   one rank that trains in NumPy; then another rank is killed
    train_ddp     one rank that trains with PyTorch's DistributedDataParallel; model: its GPT
    corpus        the standard library's source text

This module is the command: it starts the ranks as `unisono run` does, and judges how they ended. It does not
import torch; the ranks do.
"""

from __future__ import annotations

import argparse
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
BENCH = "bench all_reduce -n 2 -b 4 -e 64M -f 64 --rounds 3 --against memcpy --no-limit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("-n", "--ranks", type=int, default=4, help="processes (default 4)")
    add("--only", choices=PARTS, help="one part: training in NumPy, the benchmark, PyTorch's DDP")
    add("--numpy-seconds", type=float, default=20.0, help="seconds of training in NumPy (default 20)")
    add("--steps", type=int, default=100, help="steps of DDP (default 100)")
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
    for name in ("ranks", "steps", "numpy_seconds"):
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
        run_ranks(n, "unisono.commands.demo.train_numpy", {"seconds": args.numpy_seconds}, ends)
        codes = {one["rank"]: one["code"] for one in json.loads(ends.read_text())["ranks"]}
    expected = dict.fromkeys(range(n), 0) | ({n - 1: signal.SIGKILL} if n > 1 else {})
    return "" if codes == expected else f"the NumPy part failed: its ranks ended with {codes}"


def show_timing(_: argparse.Namespace) -> str:
    """The benchmark: all_reduce between two ranks against memcpy."""
    print(f"\nunisono {BENCH}", flush=True)
    done = subprocess.run([sys.executable, "-m", "unisono", *BENCH.split()], check=False)
    return f"the benchmark failed (exit code {done.returncode})" if done.returncode else ""


def show_ddp(args: argparse.Namespace) -> str:
    """Train with DDP once per backend on the same steps, then compare.

    Both runs have the same initial weights and data. The sums of the gradients may differ in the last
    bit: the ranks' contributions are added in another order. Training amplifies that.
    """
    if find_spec("torch") is None:
        print(f"\nPyTorch is not installed: no DDP training here. With it: {INSTALL_TORCH}")
        return ""
    losses: dict[str, list[float]] = {}
    lines = []
    for backend in (part.strip() for part in args.backends.split(",")):
        name = BACKENDS[backend]
        print(f"\n{name}: {args.ranks} ranks train a GPT with PyTorch's DDP", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "record.json")
            options = {"backend": backend, "steps": args.steps, "record": record}
            code = run_ranks(
                args.ranks, "unisono.commands.demo.train_ddp", options, Path(folder, "ends.json")
            )
            if code or not record.exists():
                return f"the run over {name} failed (exit code {code})"
            ranks = json.loads(record.read_text())
        if len({one["digest"] for one in ranks}) > 1:
            return f"the ranks ended with different parameters over {name}"
        losses[name] = [fmean(each) for each in zip(*(one["losses"] for one in ranks), strict=True)]
        step_ms = 1e3 * median(ranks[0]["seconds"][2:] or ranks[0]["seconds"])  # the first ones allocate
        lines.append(
            f"{name:8} {step_ms:8.1f} ms a step   loss {fmean(losses[name][-20:]):.4f} nats per byte   "
            f"parameters bit-identical on {len(ranks)} ranks"
        )
    print("\n".join(["", *lines]))
    if len(losses) > 1:
        gaps = [abs(one - other) for one, other in zip(*losses.values(), strict=True)]
        early = f"{max(gaps[:10]):.1e} in the first 10 steps, {max(gaps):.1e} in all {len(gaps)}"
        print(f"largest difference in loss, {' to '.join(losses)}: {early}")
    return ""


PARTS = {"numpy": show_numpy, "timing": show_timing, "ddp": show_ddp}
