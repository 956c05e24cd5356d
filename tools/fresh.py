"""Runs README's two commands as on a new user's machine: `make test-fresh`.

Every variant is a fresh clone in a temporary folder, with an empty home and without this environment's
variables and pip settings: pip installs from PyPI. Uncommitted changes are not tested.

    cuda    make demo, make test                 PyTorch's CUDA build
    cpu     make demo, make test TORCH=cpu       PyTorch's CPU build
    none    make demo, make test TORCH=0         without PyTorch

Examples: make test-fresh ARGS="none cpu"; ARGS="none --make PYTHON=python3.13"; ARGS="cuda --only test
--make TORCH_VERSION=2.12.1"; ARGS="--env PIP_CERT=/etc/ssl/ca.crt" where pip needs that; ARGS="cpu --make
'TORCH_PIP=--find-links FOLDER'" where the CPU build's own index cannot be reached.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATH = "/usr/local/bin:/usr/bin:/bin"
VARIANTS = {"cuda": [], "cpu": ["TORCH=cpu"], "none": ["TORCH=0"]}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("variants", nargs="*", metavar="VARIANT", help=f"some of {', '.join(VARIANTS)} (default all)")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="passed on; PATH is " + PATH)
    add("--make", action="append", default=[], metavar="NAME=VALUE", help="a variable for make")
    add("--only", choices=["demo", "test"], help="run one of the two commands only")
    add("--folder", help="folder for the temporary folders; cuda needs 10 GB")
    add("--limit", type=float, default=3600, help="seconds for one command (default 3600)")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variant {unknown[0]!r}: choose from {', '.join(VARIANTS)}")
    return arguments


def main() -> int:
    """Run the variants in order, and show the outcome of each command."""
    arguments = parse()
    rows = [row for variant in arguments.variants or VARIANTS for row in run_variant(variant, arguments)]
    print(f"\n{'variant':<8} {'code':>4} {'seconds':>7}  command", *rows, sep="\n")
    return int(any(row.split()[1] != "0" for row in rows))


def run_variant(variant: str, arguments: argparse.Namespace) -> list[str]:
    """Run both commands in a temporary clone; return a line for each."""
    with tempfile.TemporaryDirectory(prefix=f"unisono-fresh-{variant}-", dir=arguments.folder) as name:
        clone, home, temporary = (Path(name, part) for part in ("unisono", "home", "tmp"))
        home.mkdir()
        temporary.mkdir()
        subprocess.run(["git", "clone", "--quiet", "--depth=1", ROOT.as_uri(), clone], check=True)
        env = {"HOME": str(home), "PATH": PATH, "TMPDIR": str(temporary), "PIP_CONFIG_FILE": os.devnull}
        env |= dict(pair.split("=", 1) for pair in arguments.env)
        rows = []
        for command in commands(variant, arguments):
            print(f"\n######## {variant}: {' '.join(command)}", flush=True)
            started = time.monotonic()
            code = run(command, clone, env, arguments.limit)
            took_s = time.monotonic() - started
            rows.append(f"{variant:<8} {code:>4} {took_s:>7.0f}  {' '.join(command)}")
        return rows


def commands(variant: str, arguments: argparse.Namespace) -> list[list[str]]:
    """Return the commands of a variant."""
    demo, test = ["make", "demo", *arguments.make], ["make", "test", *VARIANTS[variant], *arguments.make]
    return [demo] * (arguments.only != "test") + [test] * (arguments.only != "demo")


def run(command: list[str], folder: Path, env: dict[str, str], limit_s: float) -> int:
    """Return the exit code, negative for a signal. After `limit_s` it is killed with its children."""
    with subprocess.Popen(command, cwd=folder, env=env, start_new_session=True) as process:
        try:
            return process.wait(limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return process.wait()


if __name__ == "__main__":
    sys.exit(main())
