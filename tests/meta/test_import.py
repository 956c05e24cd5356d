"""`import unisono` is quick, brings no PyTorch, and starts and opens nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BUDGET_S = 0.100
ROUNDS = 12

PROGRAMS = Path(__file__).parent / "programs"


def imported() -> dict:
    """Import unisono in a fresh interpreter."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    command = [sys.executable, str(PROGRAMS / "timed_import.py")]
    run = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    return json.loads(run.stdout)


@pytest.mark.skipif("UNISONO_SANITIZED" in os.environ, reason="everything is slow under a sanitizer")
def test_import_takes_under_100_ms_of_a_core():
    best = float("inf")
    for _ in range(ROUNDS):  # other work empties the caches: one undisturbed import is what counts
        best = min(best, imported()["took_s"])
        if best < BUDGET_S:
            return
    pytest.fail(f"import unisono takes {best * 1e3:.0f} ms at best, the budget is {BUDGET_S * 1e3:.0f} ms")


@pytest.mark.parametrize(
    "unwanted",
    ["torch", "pickle", "asyncio", "matplotlib", "unisono.commands.demo", "unisono.commands.bench"],
)
def test_import_brings_no(unwanted):
    assert unwanted not in imported()["modules"]


@pytest.mark.parametrize("ranks_per_host", ["2", "1"])
def test_a_group_brings_nothing_that_its_ranks_can_do_without(ranks_per_host: str, tmp_path: Path):
    """64 ranks on two cores pay 32 times for what each imports."""
    program = str(PROGRAMS / "modules_of_a_rank.py")
    environment = {**os.environ, "UNISONO_RANKS_PER_HOST": ranks_per_host}
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", program, str(tmp_path)]
    subprocess.run(command, check=True, env=environment)
    unwanted = {"numpy", "dataclasses", "logging", "ssl", "subprocess", "concurrent.futures"}
    if sys.version_info < (3, 11):
        unwanted.remove("subprocess")  # msgspec imports uuid, and that imports it there
    unwanted |= {
        "unisono.plans.proof",
        "unisono.engine.store.tcp_server",
        "unisono.engine.store.file",
        "unisono.engine.encoding",
    }
    for rank in "01":
        brought = set((tmp_path / rank).read_text().split())
        assert ("unisono.engine.bootstrap.host_connections" in brought) == (ranks_per_host == "1")
        assert not unwanted & brought
