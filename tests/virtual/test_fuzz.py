"""Random programs over several devices: the CPU's bits, or an error; nothing left behind."""

import subprocess
import sys
from pathlib import Path

from effort import HANG_S

FUZZ = Path(__file__).resolve().parent / "fuzz.py"


def test_a_thousand_programs():
    done = subprocess.run(
        [sys.executable, str(FUZZ), "1000", "0"], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
