"""benchmarks/report.py without its commands: the page of a run, parts that fail or find no time."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "report.py"
spec = importlib.util.spec_from_file_location("figures_report", FILE)
report = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = report  # where dataclasses look
spec.loader.exec_module(report)

SLEEPS = Path(__file__).parent / "programs" / "sleeps.py"
LINE = {"nbytes": 4, "p50_us": 1.0, "best_ratio": None}
NOISE = {"quiet": False, "others_cpu_share": 0.2, "stolen_cpu_share": 0.1}


def test_a_page_has_every_part_and_says_how_far_two_runs_differ():
    first = {"lines": [LINE, {**LINE, "nbytes": 64, "p50_us": 2.4}], "noise": NOISE}
    second = {"lines": [LINE, {**LINE, "nbytes": 64, "p50_us": 2.0}], "noise": NOISE}
    parts = {
        "all_reduce-2": {"command": "first", "record": first, "text": "the first table"},
        "all_reduce-2-again": {"command": "second", "record": second, "text": "the second table"},
        "decode": {"error": "left out"},
    }
    text = report.page({"date": "today", "machine": {"cpu": "a processor", "cores": 2}, "parts": parts})
    assert "times agree NOT within 10%, at most 20.0% apart (64 bytes)" in text
    assert "No figures: left out" in text
    assert "## all_reduce-2\n\n`first`\n\n```\nthe first table\n```\n" in text


def test_every_part_names_a_command_that_exists():
    names = [part.name for part in report.parts()]
    assert len(set(names)) == len(names)
    assert sum(part.seconds for part in report.parts()) <= 12 * 60
    with pytest.raises(SystemExit, match="no part nonsense"):
        report.chosen_parts("nonsense")


def test_a_part_that_fails_or_finds_no_time_is_told():
    failing = report.Part("failing", 1.0, ("-c", "raise SystemExit('no good')"))
    slow = report.Part("slow", 1.0, (str(SLEEPS),))
    good = report.Part("good", 1.0, ("-c", "print('{\"a\": 1}')"))
    assert "no good" in report.run(failing, dict(os.environ), 30.0)["error"]
    assert "not done within" in report.run(slow, dict(os.environ), 0.5)["error"]
    assert report.run(good, dict(os.environ), 30.0)["record"] == {"a": 1}
    assert "left out" in report.run_all([good], 0.0)["good"]["error"]
