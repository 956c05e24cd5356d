"""examples/plan_trainer.py under plans logs what Hugging Face's Trainer logs in one process."""

import importlib.util
import json
from pathlib import Path

import pytest

import suite
from ports import reserved
from programs.trainer import CASES, PLANS, REPORTED

NEEDS = ("transformers", "accelerate")
TOLERANCE = 1e-4  # the norm of the gradients is summed in another order


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_rates_are_those_of_the_trainer(
    forks: suite.Forks, tmp_path: Path, case: str
) -> None:
    for package in NEEDS:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    wanted = logged(forks, tmp_path, "alone", case)
    for title in PLANS:
        found = logged(forks, tmp_path, title, case)
        assert len(found) == len(wanted), title
        for mine, its in zip(found, wanted, strict=True):
            for name, value, expected in zip(REPORTED, mine, its, strict=True):
                assert value == pytest.approx(expected, abs=TOLERANCE), (title, name, mine, its)


def logged(forks: suite.Forks, folder: Path, title: str, case: str) -> list[list[float | None]]:
    result, size = folder / f"{title}.json", 1 if title == "alone" else PLANS[title].ranks
    with reserved() as port:
        job = ("programs.trainer", size, [str(port), title, case, str(result)])
        texts = forks.run(folder, {title: job})[title]
    assert result.exists(), "\n".join(texts)
    return json.loads(result.read_text())
