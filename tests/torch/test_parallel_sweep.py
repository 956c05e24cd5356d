"""Every plan gives one process's losses. The fast part runs here; all of it by `make test-parallel`."""

import json
from pathlib import Path

import pytest

import suite
from effort import HANG_S

pytest.importorskip("torch")
from parallel import sweep


def run(forks: suite.Forks, folder: Path, size: int, which: str, limit_s: float) -> dict[str, float]:
    (printed, *_) = forks.run(folder, {"sweep": ("parallel.sweep", size, [which])}, limit_s=limit_s)["sweep"]
    written = folder / "sweep" / "results.json"
    if not written.exists():
        pytest.fail(printed, pytrace=False)
    found: dict[str, float] = json.loads(written.read_text())
    return found


def check(results: dict[str, float], trials: list[sweep.Trial]) -> None:
    assert set(results) == set(map(str, trials))
    far = [f"{results[str(t)]:.1e} {t}" for t in trials if not results[str(t)] < sweep.TOLERANCE]
    assert not far, "\n".join(far)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_plans_give_the_losses_of_one_process(forks: suite.Forks, tmp_path: Path, size: int) -> None:
    check(run(forks, tmp_path, size, "fast", HANG_S), sweep.fast(size))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_all_plans_give_the_losses_of_one_process(forks: suite.Forks, tmp_path: Path, size: int) -> None:
    check(run(forks, tmp_path, size, "all", 3500), sweep.trials(size))


def test_the_sweep_is_as_wide_as_it_claims() -> None:
    trials = [trial for size in (1, 2, 4, 8) for trial in sweep.trials(size)]
    assert len(trials) >= 120
    for key, values in {"zero": {0, 1, 2, 3}, "precision": {"f32", "bf16", "fp16"}}.items():
        assert {trial.plan[key] for trial in trials} == values
    assert {trial.plan["schedule"] for trial in trials if trial.plan["pipeline"] > 1} == set(sweep.SCHEDULES)
    assert {trial.model for trial in trials} == set(sweep.NAMES)
