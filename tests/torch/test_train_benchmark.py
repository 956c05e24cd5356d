"""benchmarks/train.py on a model that takes no time."""

from __future__ import annotations

import re

import suite
from test_launch import run

PROGRAM = suite.HERE.parents[1] / "benchmarks" / "train.py"


def test_both_backends_train_and_agree():
    tiny = ["--model", "70K", "--context", "8", "--rounds", "2", "--steps", "1"]
    out = run(str(PROGRAM), *tiny, limit_s=110)
    for way in ("ddp", "fsdp2"):
        assert re.search(rf"^# {way}: 0\.\d million parameters, losses differ by ", out, re.MULTILINE), out
        assert re.search(rf"^{way} +unisono .* ratio \d\.\d+ ", out, re.MULTILINE), out
