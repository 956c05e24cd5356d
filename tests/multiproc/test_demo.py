"""What `make demo` shows without PyTorch: ranks train, and name the one that is killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from effort import HANG_S

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "language_model.py"


def test_ranks_train_and_name_the_one_that_is_killed():
    command = [sys.executable, "-m", "unisono", "run", "-n", "3", str(EXAMPLE), "--seconds", "2"]
    done = subprocess.run(
        [*command, "--lose-a-rank"], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 137, done.stdout + done.stderr
    first, last = re.search(r"loss (\d\.\d\d) -> (\d\.\d\d), the same bits on 3 ranks", done.stdout).groups()
    assert float(last) < float(first) - 0.3
    pid = re.search(r"\[rank 2\] kill -9 (\d+)\n", done.stdout)[1]
    assert f"PeerLost: barrier failed: rank 2 (pid {pid}) was ended by SIGKILL" in done.stderr


def test_old_command_starts_the_example_of_the_package():
    command = [sys.executable, "-m", "unisono", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        shown = demo.stdout.readline()
        demo.terminate()  # it trains for ten seconds on all cores; the test above sees the end
        said = demo.communicate(timeout=HANG_S)[1]
    assert demo.returncode == 128 + signal.SIGTERM, shown + said
    assert "is now `unisono run -n 4 -m unisono.examples.language_model --lose-a-rank`" in said
    assert re.match(r"\[rank 0\] step +\d+   loss \d", shown), shown + said


def test_ranks_go_on_without_the_one_that_is_killed():
    words = [
        "run",
        "--elastic",
        "2:3",
        "--respawn",
        "3",
        str(EXAMPLE.with_name("elastic.py")),
        "--lose-a-rank",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "unisono", *words],
        capture_output=True, text=True, timeout=HANG_S, check=False, env={**os.environ, "PAUSE_S": "0.03"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is out: ended by SIGKILL; 2 ranks go on" in done.stderr
    # On a busy machine the others may be done before the replacement has started.
    assert done.stdout.count("the largest eigenvalue is") in (2, 3), done.stdout
