"""Random programs over several devices: the CPU's bits, or an error; nothing left behind."""

from pathlib import Path

from python_runs import ran

FUZZ = Path(__file__).resolve().parent / "fuzz.py"


def test_a_thousand_programs():
    done = ran(FUZZ, "1000", "0")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
