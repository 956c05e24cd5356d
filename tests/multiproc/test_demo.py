"""The demo without PyTorch: it trains, loses a rank, measures."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

from loops import each
from unisono.commands import demo
from unisono.commands.demo.train_numpy import CONTEXT, SHAPES, Adam, NextByte

DEMO = [sys.executable, "-m", "unisono", "demo"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *words], capture_output=True, text=True, timeout=100, check=False)


def batch(count: int) -> tuple[np.ndarray, np.ndarray]:
    data = np.random.default_rng(1).integers(97, 105, (count, CONTEXT + 1)).astype(np.uint8)
    return data[:, :-1], data[:, -1]


@each("name", list(SHAPES))
def test_the_gradient_is_the_slope_of_the_loss(name: str):
    model = NextByte(0)
    model.of["out_weight"][:] *= 10  # away from where every gradient is small
    contexts, following = batch(8)
    model.loss(contexts, following)
    slopes = model.slopes[name].copy()
    where = np.unravel_index(np.abs(slopes).argmax(), slopes.shape)
    losses, width = [], 1e-2
    for sign in (1, -1):
        model.of[name][where] += sign * width
        losses.append(model.loss(contexts, following))
        model.of[name][where] -= sign * width
    assert (losses[0] - losses[1]) / (2 * width) == pytest.approx(slopes[where], rel=0.02, abs=1e-4)


def test_the_model_learns_by_heart():
    model, (contexts, following) = NextByte(0), batch(4)
    adam = Adam(model.parameters)
    first = model.loss(contexts, following)
    for _ in range(60):
        model.loss(contexts, following)
        adam.step(model.gradient, 1e-2)
    assert first == pytest.approx(np.log(256), abs=0.2)
    assert model.loss(contexts, following) < 0.2
    continued = model.generate(b"ab", 5, temperature=0.5, seed=0)
    assert continued.startswith(b"ab") and len(continued) == 7


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


def test_times_are_short_text():
    assert [demo.us_text(us) for us in (0.64, 719.2, 13982)] == ["0.6 us", "719 us", "14.0 ms"]


@each(
    "ends, fails",
    [({0: 0, 1: 0, 2: 9}, False), ({0: 0, 1: 1, 2: 9}, True), ({0: 0, 1: 0, 2: 0}, True), ({2: 9}, True)],
)
def test_a_demo_whose_ranks_end_otherwise_fails(ends: dict[int, int], fails: bool):
    assert bool(demo.numpy_fault(3, ends)) == fails
