"""Groups whose timeout is longer than the kernel's waits can be."""

from pathlib import Path

import pytest

import ranks

pytestmark = pytest.mark.usefixtures("spread")

PROGRAM = Path(__file__).resolve().parent / "programs" / "uses_a_timeout.py"


def test_groups_are_made_and_used() -> None:
    ranks.processes(2, PROGRAM, "1e10", "math.inf", "timedelta.max", "timedelta(days=10000)", "2.2e6")


def test_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "1e10")
    monkeypatch.setenv("UNISONO_PEER_TIMEOUT_S", "1e10")
    ranks.processes(2, PROGRAM, "None")
