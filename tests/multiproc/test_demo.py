"""The demo without PyTorch: it trains, loses a rank, measures."""

from __future__ import annotations

import re
import subprocess
import sys

from loops import each

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
    assert re.findall(r"^ +(\d+) +\d+ +f32", done.stdout, re.MULTILINE) == [str(4 * 64**n) for n in range(5)]


@each(
    "words, told",
    [
        (["--steps", "0"], "--steps 0: must be positive"),
        (["--backends", "mpi"], "unknown backend 'mpi': choose from unisono, gloo"),
    ],
)
def test_bad_arguments_are_one_line(words: list[str], told: str):
    done = run(*words)
    assert (done.returncode, done.stderr) == (2, f"unisono demo: {told}\n")
