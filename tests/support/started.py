"""The real launchers that the tests in tests/launchers have started, with their versions."""

import contextlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import hosts
from effort import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "tests" / "launchers" / "rank_program.py")
VERSIONS = pytest.StashKey[dict[str, str]]()


def note(config: pytest.Config, name: str, command: list[str], remedy: str) -> str:
    """The path of `command`, whose version is listed at the end; skips where it is not installed."""
    found = shutil.which(command[0])
    if not found:
        pytest.skip(f"{name} is not here: {remedy}")
    done = subprocess.run([found, *command[1:]], capture_output=True, text=True, timeout=HANG_S)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]
    version = next((line for line in lines if "ersion:" in line), lines[0] if lines else "?")
    config.stash[VERSIONS][name] = version
    return found


def lines(text: str) -> list[str]:
    """The output of the ranks, in their order."""
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


def sums(*where: str) -> list[str]:
    """The output of `rank_program.py` on these hosts."""
    total = sum(range(1, len(where) + 1))
    return [f"rank {rank} of {len(where)} on {host}: {total}" for rank, host in enumerate(where)]


def name_hosts(net: hosts.Network, folder: Path) -> None:
    """Names as on Debian: a host's own name means 127.0.1.1 there, the others' their address. And a route."""
    for node in net:
        others = "".join(f"{each.address} {each.name}\n" for each in net if each is not node)
        names = folder / f"hosts-{node.name}"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n{others}")
        node.must("mount", "--bind", str(names), "/etc/hosts")
        node.must("ip", "route", "add", "default", "dev", hosts.INTERFACE)


MORTAL = ("setpriv", "--pdeathsig", "KILL")
"""Before the command of a daemon: it ends when the tests do, even when they are killed."""


def end_with(stack: contextlib.ExitStack, process: subprocess.Popen[Any]) -> None:
    """End a daemon when `stack` ends."""

    def end() -> None:
        process.terminate()
        try:
            process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    stack.callback(end)
