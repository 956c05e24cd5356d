"""benchmarks/train.py on a model that takes no time, benchmarks/decode.py for a few tokens."""

import re

import pytest

import suite
from effort import cases
from python_runs import fine as run

BENCHMARKS = suite.HERE.parents[1] / "benchmarks"


@pytest.mark.sweep  # each rank of two sides imports PyTorch
@pytest.mark.parametrize("ranks", cases([1], long=[2]))
def test_both_backends_train_and_agree(ranks):
    tiny = ["--ranks", str(ranks), "--model", "70K", "--context", "8", "--rounds", "1", "--steps", "1"]
    out = run(str(BENCHMARKS / "train.py"), *tiny)
    for way in ("ddp", "fsdp2"):
        assert re.search(rf"^{way} +unisono .* ratio +\d+\.\d+ ", out, re.MULTILINE), out
    assert re.search(r"^# 0\.\d million parameters, .*, losses differ by ", out, re.MULTILINE), out
    assert "hidden" in out


@pytest.mark.sweep  # each rank of each of four sides imports PyTorch
@pytest.mark.parametrize("ranks", cases([1], long=[2]))
def test_all_sides_decode_the_same(ranks):
    words = ["--ranks", str(ranks), "--rounds", "1", "--tokens", "2"]
    out = run(str(BENCHMARKS / "decode.py"), *words)
    assert re.search(rf"^# {ranks} ranks, 4 layers of width 512; logits differ by \d", out, re.MULTILINE), out
    for side in ("unisono-torch", "gloo", "unisono", "alone"):
        assert re.search(rf"^{side} +\d+ tokens/s ", out, re.MULTILINE), out


@pytest.mark.sweep
def test_sequences_and_experts_over_ranks():
    job = ["-m", "unisono", "run", "-n", "2"]
    out = run(*job, str(BENCHMARKS / "long_sequences.py"), "--time", "64", "--width", "24")
    assert re.search(r"context=2: 128 positions, \d+ MB", out), out
    assert float(re.search(r"losses of 128 positions differ by (\S+)", out)[1]) < 1e-5, out
    tiny = ["--expert", "2,1", "--width", "32", "--steps", "3", "--time", "16"]
    out = run(*job, str(BENCHMARKS / "experts.py"), *tiny)
    assert re.search(r"Plan\(data=2, expert=2\): \d+ tokens/s; .*", out), out
    assert float(re.search(r"times as many tokens/s; the last losses differ by (\S+)", out)[1]) < 1e-3, out


@pytest.mark.sweep
def test_the_table_of_plans():
    """Bytes are exact: one row makes tensor ranks and stages exchange less than DDP's gradients."""
    tiny = ["table", "--tiny", "--shapes", "row", "--ways", "ddp,tensor,pipeline", "--rounds", "1"]
    out = run(str(BENCHMARKS / "train.py"), *tiny, "--steps", "1")
    found = dict(re.findall(r"^\| (\S+) \|.*\| (\d+\.\d+) \| \d+ \|$", out, re.MULTILINE))
    assert found.keys() == {"DDP", "`tensor=2`", "`pipeline=2`"}, out
    received = {way: float(mb) for way, mb in found.items()}
    assert received["DDP"] > 5 * received["`pipeline=2`"] > 0, out
    assert received["DDP"] > 5 * received["`tensor=2`"] > 0, out
