"""`unisono demo`: Unisono in a minute: training, a rank that dies, a benchmark; then PyTorch.

    numpy_train, numpy_model   one rank that trains in NumPy; then another rank is killed
    train, model               one rank that trains with PyTorch's DistributedDataParallel
    numpy_part, ddp, timing    the parts of the command; communication: the share of a step
    corpus   the standard library's source text       jobs   starts the ranks, reads their reports
    screen   progress and comparison

This module is the command. It does not import torch; the ranks do.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from unisono.demo import ddp, numpy_part, timing
from unisono.demo.screen import Progress

__all__ = ["add_arguments", "main"]

INSTALL_TORCH = "pip install torch"
EXIT_INTERRUPTED = 130
PARTS = ("numpy", "timing", "ddp")


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
    backends = [name.strip() for name in args.backends.split(",")]
    complaint = complain(args, backends)
    if complaint:
        print(f"unisono demo: {complaint}", file=sys.stderr)
        return 2
    progress = Progress(sys.stdout)
    try:
        return run_parts(args, backends, progress)
    except KeyboardInterrupt:
        progress.clear()
        print("unisono demo: interrupted, all ranks ended", file=sys.stderr)
        return EXIT_INTERRUPTED


def complain(args: argparse.Namespace, backends: list[str]) -> str | None:
    """Return the fault of the arguments or the installation, in one line; None: there is none."""
    if args.only == "ddp" and find_spec("torch") is None:
        return f"this needs PyTorch: {INSTALL_TORCH}"
    unknown = [name for name in backends if name not in ddp.BACKENDS]
    if unknown:
        return f"unknown backend {unknown[0]!r}: choose from {', '.join(ddp.BACKENDS)}"
    for name in ("ranks", "steps", "seconds", "batch", "numpy_seconds"):
        if getattr(args, name) <= 0:
            return f"--{name.replace('_', '-')} {getattr(args, name)}: must be positive"
    return None


def run_parts(args: argparse.Namespace, backends: list[str], progress: Progress) -> int:
    """Show the parts in order, up to one that fails."""
    for part in [args.only] if args.only else PARTS:
        if part == "numpy":
            code = numpy_part.show(args, progress)
        elif part == "timing":
            code = timing.show(progress)
        elif find_spec("torch") is None:
            progress.line(f"\nPyTorch is not installed: no DDP training here. With it: {INSTALL_TORCH}")
            code = 0
        else:
            code = ddp.compare(args, backends, progress)
        if code:
            return code
    return 0
