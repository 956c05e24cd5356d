"""The demo's DDP part on two ranks: over Unisono as over Gloo, and Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

COMMAND = ["env", "--default-signal=INT", sys.executable, "-m", "unisono", "demo", "--only", "ddp", "-n", "2"]


@pytest.mark.timeout(300)
def test_trains_over_unisono_and_agrees_with_gloo():
    done = subprocess.run(
        [*COMMAND, "--steps", "8"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(text) for text in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert losses[0] > 5
    assert losses[-1] < losses[0]
    assert done.stdout.count("bit-identical on 2 ranks") == 2
    early = re.search(r"Unisono to Gloo: (\S+) in the first 10 steps", done.stdout)
    assert early is not None
    assert float(early.group(1)) < 1e-4


@pytest.mark.parametrize("after", ["Gloo: ", " loss "])
def test_ctrl_c_is_clean(after: str):
    with subprocess.Popen(
        [*COMMAND, "--backends", "gloo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while after not in (line := process.stdout.readline()):
            assert line, process.communicate()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=15)
    assert process.returncode == 130
    assert errors.endswith("unisono demo: interrupted, all ranks ended\n")
    assert "Traceback" not in output + errors
