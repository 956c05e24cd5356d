"""`unisono doctor` tells what is here, and what is wrong with the environment."""

from __future__ import annotations

import argparse

import pytest

from unisono import doctor
from unisono.buffers import DTYPES
from unisono.plans import ALGORITHMS


def test_report_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(argparse.Namespace()) == 0
    report = capsys.readouterr().out
    assert all(word in report for word in [*ALGORITHMS, *DTYPES, "usable cores", "numpy", "timeout_s"])


def test_malformed_variable_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "soon")
    assert doctor.main(argparse.Namespace()) == 1
    assert "UNISONO_TIMEOUT_S is malformed" in capsys.readouterr().out
