"""`unisono doctor` tells what is here, and what is wrong with the environment."""

import argparse
import importlib.util

import pytest

from unisono import is_available
from unisono.commands import doctor
from unisono.commands.doctor import torch_trial, trial
from unisono.engine.memory.buffers import DTYPES
from unisono.errors import UnisonoError
from unisono.plans import ALGORITHMS


def test_report_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(argparse.Namespace(backends=False)) == 0
    report = capsys.readouterr().out
    assert all(word in report for word in [*ALGORITHMS, *DTYPES, "usable cores", "numpy", "lo (", "cuda"])


def test_what_is_missing_for_a_backend_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "why_not", lambda name: "mpi4py is not installed" if name == "mpi" else "")
    assert doctor.main(argparse.Namespace(backends=False)) == 0
    report = capsys.readouterr().out
    assert "not available here: mpi4py is not installed. pip install mpi4py mpich" in report
    assert report.count("not available here") == 1


def test_settings_have_the_names_that_a_user_can_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "7")
    monkeypatch.setenv("RANK", "3")
    assert doctor.main(argparse.Namespace(backends=False)) == 0
    lines = [line.split() for line in capsys.readouterr().out.partition("\nsettings\n")[2].splitlines()]
    assert ["UNISONO_TIMEOUT_S", "7.0", "environment"] in lines
    assert ["RANK", "3", "environment"] in lines
    assert ["UNISONO_STAGING_BYTES", "1048576", "default"] in lines
    assert all(line[0].isupper() for line in lines if line)


def test_is_available_for_every_backend() -> None:
    assert is_available()
    assert is_available("auto") and is_available("auto", "cpu") and not is_available("auto", "cuda")
    assert not is_available("native", "cuda")
    assert not is_available("mpi", "cuda")
    assert not is_available("nonsense")
    assert is_available("gloo") == (importlib.util.find_spec("torch") is not None)


def test_backends_are_tried(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(name: str) -> dict[str, str]:
        if name != "native":
            raise UnisonoError("not here")
        return {**dict.fromkeys(trial.OPERATIONS, "yes"), "probe": "for a reason"}

    def of_torch(backend: str, device: str) -> dict[str, str]:
        if backend != "gloo":
            raise UnisonoError("not here")
        return {**dict.fromkeys(torch_trial.FUNCTIONS, "yes"), "reduce": device}

    monkeypatch.setattr(doctor, "try_backend", tried)
    monkeypatch.setattr(torch_trial, "try_torch", of_torch)
    assert doctor.main(argparse.Namespace(backends=True)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["barrier", "yes", *["not", "tried"] * 3] in rows
    assert ["probe", "no", *["not", "tried"] * 3] in rows
    assert ["native:", "probe:", "for", "a", "reason"] in rows
    assert ["mpi:", "not", "here"] in rows
    if importlib.util.find_spec("torch") is not None:
        not_tried = ["not", "tried"]
        assert ["broadcast", *not_tried * 2, "yes", "yes", *not_tried * 4] in rows
        assert ["gloo", "cuda:", "reduce:", "cuda"] in rows and ["nccl", "cpu:", "not", "here"] in rows


def test_malformed_variable_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "soon")
    assert doctor.main(argparse.Namespace(backends=False)) == 1
    assert "UNISONO_TIMEOUT_S is malformed" in capsys.readouterr().out
