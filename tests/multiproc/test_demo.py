"""The demo without PyTorch: it trains, loses a rank, measures."""

from __future__ import annotations

import re
import subprocess
import sys

from loops import each
from unisono.commands import demo

DEMO = [sys.executable, "-m", "unisono", "demo"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *words], capture_output=True, text=True, timeout=100, check=False)


def test_ranks_train_and_name_the_one_that_was_killed():
    done = run("-n", "3", "--only", "numpy", "--numpy-seconds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = re.search(r"loss (\d\.\d\d) -> (\d\.\d\d) nats per byte", done.stdout).groups()
    assert float(last) < float(first) - 0.3
    assert "parameters on 3 ranks: the same bits" in done.stdout
    pid = re.search(r"\[rank 2\] kill -9 (\d+)\n", done.stdout)[1]
    told = re.findall(
        r"\[rank (\d)\] \d+ ms later: PeerLost: .*rank 2 \(pid (\d+)\) was ended by SIGKILL", done.stdout
    )
    assert sorted(told) == [("0", pid), ("1", pid)]
    assert "\x1b" not in done.stdout


def test_one_rank_has_nobody_to_lose():
    done = run("-n", "1", "--only", "numpy", "--numpy-seconds", "0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed" not in done.stdout


def test_all_reduce_is_timed_against_memcpy():
    done = run("--only", "timing")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ +(\S+ (?:B|KiB|MiB)) +\S+ [um]s +\S+ [um]s +0$", done.stdout, re.MULTILINE)
    assert rows == ["4 B", "256 B", "16 KiB", "1 MiB", "64 MiB"]


@each(
    "ends, fails",
    [({0: 0, 1: 0, 2: 9}, False), ({0: 0, 1: 1, 2: 9}, True), ({0: 0, 1: 0, 2: 0}, True), ({2: 9}, True)],
)
def test_a_demo_whose_ranks_end_otherwise_fails(ends: dict[int, int], fails: bool):
    assert bool(demo.numpy_fault(3, ends)) == fails
