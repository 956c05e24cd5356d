"""A run's record in other forms: CSV, the OSU benchmarks' columns, a picture."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from effort import HANG_S
from unisono.commands.bench import report

RECORD = {
    "lines": [
        {
            "operation": "broadcast", "nbytes": 8, "count": 2, "dtype": "f32", "ranks": 2, "p50_us": 1.5,
            "p99_us": 3.0, "block_us": 2.0, "wrong": 0,
            "peers": {"mpich": {"p50_us": 3.0, "p99_us": 4.0, "ratio": 0.5, "wrong": 0},
                      "gloo": {"error": "no"}},
        }
    ]
}  # fmt: skip


def test_csv_has_a_row_per_library():
    assert report.to_csv(RECORD).splitlines()[1:] == [
        "broadcast,8,2,f32,2,unisono,1.5,3.0,,0",
        "broadcast,8,2,f32,2,mpich,3.0,4.0,0.5,0",
        "broadcast,8,2,f32,2,gloo,,,,",
    ]


def test_osu_has_size_and_latency():
    assert report.to_osu(RECORD).splitlines()[-1].split() == ["8", "2.00"]


def test_plot_writes_a_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    # A process of its own: matplotlib keeps its fonts open.
    program = Path(__file__).parent / "programs" / "plots_a_record.py"
    words = [sys.executable, str(program), json.dumps(RECORD), str(tmp_path / "out.png")]
    subprocess.run(words, check=True, timeout=HANG_S)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
