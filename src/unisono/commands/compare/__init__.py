"""`unisono compare`: runs a training script on several numbers of ranks, and says where their numbers part.

    unisono compare -n 1,2,4 train.py --batch '{64/ranks}'

The script is unchanged (see unisono.compare). It has to make the same whole batch on any number of ranks: in
its arguments '{ranks}' becomes the number of ranks, and '{64/ranks}' 64 divided by it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from unisono.compare.causes import finding
from unisono.compare.parting import numbers
from unisono.compare.records import TrialRun, read_run
from unisono.engine.environment import env

__all__ = ["add_arguments", "main"]

LAST_LINES = 30  # of the output of a run that failed
DIVIDED = re.compile(r"\{(\d+)/ranks\}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.usage = "%(prog)s [-n 1,2] [flags] script.py [args ...]"
    parser.allow_abbrev = False
    add = parser.add_argument
    add("-n", default="1,2", metavar="N,N", help="numbers of ranks; each is compared with the first (1,2)")
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    add("--virtual-gpus", action="store_true", help="each rank has a virtual GPU")
    add("--against", choices=["gloo"], help="compare each run over Unisono with one over Gloo, too")
    add(
        "--steps", type=int, default=20, metavar="N", help="a run ends after N steps; 0: with the script (20)"
    )
    add("script", help="what every rank runs")
    add("args", nargs=argparse.REMAINDER, help="its arguments; {ranks} and {64/ranks} stand for numbers")


def main(args: argparse.Namespace) -> int:
    """Run and compare. Exit code: 0 they agree, 1 they part, 2 nothing can be said."""
    try:
        sizes = _sizes(args)
        runs = [_run(size, args) for size in sizes]
        others = [_run(size, args, replaced=False) for size in sizes if args.against]
    except ValueError as error:
        sys.stderr.write(f"unisono compare: {error}\n")
        return 2
    # Each with the first, and over Unisono with the same over the other library.
    pairs = [(runs[0], other) for other in runs[1:]] + list(zip(runs, others, strict=False))
    agree = [_compare(one, many) for one, many in pairs]
    return 0 if all(agree) else 1


def _sizes(args: argparse.Namespace) -> list[int]:
    words = args.n.split(",")
    if not all(word.isdecimal() and int(word) for word in words) or args.steps < 0:
        raise ValueError(f"-n {args.n} --steps {args.steps}: expected -n 1,2 and at least 0 steps")
    sizes = [int(word) for word in words]
    if len(sizes) < 2 and args.against is None:
        raise ValueError(f"-n {args.n} is one run: there is nothing to compare it with. Write -n 1,{args.n}")
    if sizes != sorted(set(sizes)):
        raise ValueError(f"-n {args.n}: expected different numbers, the smallest first")
    for size in sizes:  # before the first run
        for word in args.args:
            _filled(word, size)
    return sizes


def _run(ranks: int, args: argparse.Namespace, *, replaced: bool = True) -> TrialRun:
    """Run the script, and read what its ranks have recorded. replaced: with --against, over Unisono.

    Raises:
        ValueError: the run failed, or recorded nothing.
    """
    name = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if not replaced:
        name += f" over {args.against.capitalize()}"
    command = [sys.executable, "-m", "unisono", "run", "-n", str(ranks)]
    command += ["--virtual-gpus", str(ranks)] if args.virtual_gpus else []
    command += ["--replace", args.against] if args.against and replaced else []
    command += ["-m"] if args.module else []
    command += [args.script, *(_filled(word, ranks) for word in args.args)]
    with tempfile.TemporaryDirectory(prefix="unisono-compare-") as folder:
        environ = env.copy() | {"UNISONO_COMPARE": f"{args.steps}:{folder}"}
        done = subprocess.run(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            last = "\n".join(done.stdout.splitlines()[-LAST_LINES:])
            raise ValueError(f"{name} failed with exit code {done.returncode}:\n{last}")
        run = read_run(name, Path(folder), ranks)
    if args.against and run.backend != args.against:
        raise ValueError(
            f"the script asks for the backend {run.backend!r}: --against {args.against} is for scripts that "
            f"ask for {args.against!r}, and runs them once with Unisono in its place"
        )
    losses = [loss for step in (0, run.steps - 1) if (loss := run.mean_loss(step)) is not None]
    said = f", loss {losses[0]:.6g} to {losses[-1]:.6g}" if losses else ""
    print(f"{name}: {run.steps} steps{said}")
    return run


def _filled(word: str, ranks: int) -> str:
    def quotient(match: re.Match[str]) -> str:
        if int(match[1]) % ranks:
            raise ValueError(f"{word}: {match[1]} is not divisible by {ranks} ranks")
        return str(int(match[1]) // ranks)

    return DIVIDED.sub(quotient, word).replace("{ranks}", str(ranks))


def _compare(one: TrialRun, many: TrialRun) -> bool:
    """Print how two runs compare; whether they agree."""
    what, found = f"{many.name} against {one.name}", finding(one, many)
    if found is None:
        print(f"{what}: equal to rounding in {one.steps} steps")
        return True
    at, why = found
    place = f"{what}: they part at step {at.step}, {at.kind}{f' {at.name}' if at.name else ''}"
    if at.kind not in ("rows", "start"):
        who = f"rank {at.rank} of {many.name}" if at.rank >= 0 else many.name
        place += f": {numbers(at.one)[0]:.7g}, and {numbers(at.many)[0]:.7g} on {who}"
    print(f"{place}\n    {why or 'no known fault explains it'}")
    return False
