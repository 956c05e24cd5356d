"""Runs README's two commands as on a new user's machine: `make test-fresh`.

Every variant is a fresh clone in a temporary folder, with an empty home and without this environment's
variables and pip settings: pip installs from PyPI. Uncommitted changes are not tested.

    cuda    make demo, make test                 PyTorch's CUDA build
    cpu     make demo, make test TORCH=cpu       PyTorch's CPU build
    none    make demo, make test TORCH=0         without PyTorch

Examples: make test-fresh ARGS="none cpu"; ARGS="none --python python3.13";
ARGS="--env PIP_CERT=/etc/ssl/ca.crt" where pip needs that; ARGS="cpu --wheels FOLDER" where the CPU build's
own index cannot be reached; ARGS="cuda --torch 2.12.1".
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from progress import lines_of

ROOT = Path(__file__).resolve().parent.parent
PATH = "/usr/local/bin:/usr/bin:/bin"
VARIANTS = {"cuda": [], "cpu": ["TORCH=cpu"], "none": ["TORCH=0"]}
SHM = Path("/dev/shm")
END_S = 10.0  # for remaining processes to end


class Ran(NamedTuple):
    """A command of a variant, and its outcome."""

    variant: str
    command: str
    code: int
    took_s: float
    silence_s: float  # the longest time without output
    after: str  # the line before that time
    summary: str  # the last line of pytest or the demo


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("variants", nargs="*", metavar="VARIANT", help=f"some of {', '.join(VARIANTS)} (default all)")
    add("--python", help="PYTHON= for make (default: the first that the Makefile finds in PATH)")
    add("--path", default=PATH, help=f"the PATH (default {PATH})")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="passed on, for example PIP_CERT")
    add("--torch", metavar="VERSION", help="TORCH_VERSION= for make, such as 2.12.1 (default: the newest)")
    add("--wheels", metavar="FOLDER", help="folder with the CPU build's wheel, instead of PyTorch's index")
    add("--only", choices=["demo", "test"], help="run one of the two commands only")
    add("--tests", metavar="ARGS", default="", help="arguments for pytest, to run some of the tests")
    add("--folder", help="folder for the temporary folders; cuda needs 10 GB")
    add("--limit", type=float, default=3600, help="seconds for one command (default 3600)")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variant {unknown[0]!r}: choose from {', '.join(VARIANTS)}")
    return arguments


def main() -> int:
    """Run the variants in order, and show the outcome of each."""
    arguments = parse()
    status = ["git", "-C", str(ROOT), "status", "--porcelain"]
    if subprocess.run(status, capture_output=True, check=True).stdout:
        print("note: uncommitted changes are not tested", flush=True)
    before, rows = set(os.listdir(SHM)), []
    for variant in arguments.variants or VARIANTS:
        rows += run_variant(variant, arguments)
    left = sorted(set(os.listdir(SHM)) - before)
    print(table(rows))
    if left:
        print(f"left behind in {SHM}: {' '.join(left)}")
    return int(bool(left) or any(row.code for row in rows))


def run_variant(variant: str, arguments: argparse.Namespace) -> list[Ran]:
    """Run both commands in a temporary clone."""
    with tempfile.TemporaryDirectory(prefix=f"unisono-fresh-{variant}-", dir=arguments.folder) as name:
        folder = Path(name)
        clone, home, temporary = (folder / part for part in ("unisono", "home", "tmp"))
        home.mkdir()
        temporary.mkdir()
        subprocess.run(["git", "clone", "--quiet", "--depth=1", ROOT.as_uri(), clone], check=True)
        env = {"HOME": str(home), "PATH": arguments.path, "TMPDIR": str(temporary)}
        env |= {"PIP_CONFIG_FILE": os.devnull} | dict(pair.split("=", 1) for pair in arguments.env)
        rows = []
        for command in commands(variant, arguments):
            print(f"\n######## {variant}: {' '.join(command)}", flush=True)
            rows.append(run(variant, command, clone, env, arguments.limit))
        strays = end_strays(folder)
        if strays:
            rows.append(Ran(variant, "processes left behind", 1, 0, 0, "", "; ".join(strays)))
    return rows


def commands(variant: str, arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the commands of a variant."""
    python = [f"PYTHON={arguments.python}"] if arguments.python else []
    if arguments.only != "test":
        yield ["make", "demo", *python]
    if arguments.only != "demo":
        options = list(VARIANTS[variant])
        if variant == "cpu" and arguments.wheels:
            options = ["TORCH=cpu", f"TORCH_PIP=--find-links {Path(arguments.wheels).resolve()}"]
        options += [f"TORCH_VERSION={arguments.torch}"] if arguments.torch else []
        options += [f"ARGS={arguments.tests}"] if arguments.tests else []
        yield ["make", "test", *options, *python]


def run(variant: str, command: list[str], folder: Path, env: dict[str, str], limit_s: float) -> Ran:
    """Run one command, pass on its output, and measure."""
    started = last_at = time.monotonic()
    silence_s, after, line, summary = 0.0, "", "", ""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **pipes) as process:
        try:
            for text in filter(None, lines_of(process, limit_s)):
                now = time.monotonic()
                if now - last_at > silence_s:
                    silence_s, after = now - last_at, line
                last_at = now
                print(text, end="", flush=True)
                line = text.strip() or line
                summary = summary if text.startswith("make") else text.strip() or summary
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        finally:
            if process.poll() is None:
                print("######## the time is over", flush=True)
            end_group(process)
    took_s = time.monotonic() - started
    return Ran(variant, " ".join(command), process.returncode, took_s, silence_s, after, summary.strip("= "))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs, and its child processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(END_S)


def end_strays(folder: Path) -> list[str]:
    """Kill the processes that still run from a folder, after a grace period; return them."""
    deadline = time.monotonic() + END_S
    while (found := running_from(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    gone = time.monotonic() + END_S
    while found and running_from(folder) and time.monotonic() < gone:
        time.sleep(0.01)
    return [f"{pid} {command}" for pid, command in found.items()]


def running_from(folder: Path) -> dict[int, str]:
    """Return pid and command line of processes with their working directory or program in a folder."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if str(folder) in command or str(folder) in os.readlink(entry / "cwd"):
                found[int(entry.name)] = command
    return found


def table(rows: list[Ran]) -> str:
    """Return one line per command, and the longest silence below it."""
    lines = ["", f"{'variant':<8} {'verdict':<8} {'seconds':>7}  command"]
    for row in rows:
        verdict = "FAILED" if row.code else "passed"
        lines.append(f"{row.variant:<8} {verdict:<8} {row.took_s:>7.0f}  {row.command}")
        lines.append(f"{'':<26}{row.summary[:150]}")
        if row.silence_s > 1:
            lines.append(f"{'':<26}longest silence {row.silence_s:.0f} s, after: {row.after[:100]}")
    return "\n".join(lines)


if __name__ == "__main__":
    if shutil.which("git") is None:
        sys.exit("error: this needs git")
    sys.exit(main())
