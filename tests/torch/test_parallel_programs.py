"""Random programs under random plans: a few here, more in the sweep, any number by `make fuzz-models`."""

from collections import Counter
from pathlib import Path

import pytest
import torch

import suite
from effort import times
from model_fuzz.programs import PLANS, case_of, program_of
from program_fuzz import Result, Trials, shown

SEEDS = range(1, 11)


@pytest.fixture
def wide() -> object:
    """Programs compute in f64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def tried(folder: Path, forks: suite.Forks, seeds: range, plans: tuple[str, ...]) -> list[Result]:
    return Trials(folder, forks).run([case_of(seed, plans) for seed in seeds])


def test_random_programs_train_as_one_process_does(tmp_path: Path, forks: suite.Forks, wide: object) -> None:
    found = tried(tmp_path, forks, SEEDS, ("tensor", "sequence", "pipeline", "context"))
    words = Counter(each.word for each in found)
    assert not any(each.fault for each in found), "\n".join(shown(each) for each in found if each.fault)
    assert words["same"] > len(SEEDS) / 2, words
    assert sum(bool(each.cuts) for each in found) > len(SEEDS) / 3


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_random_programs(tmp_path: Path, forks: suite.Forks, wide: object, ranks: int) -> None:
    plans = tuple(name for name, (here, *_) in PLANS.items() if here == ranks)
    found = tried(tmp_path, forks, range(1000, 1000 + times(200, 2000)), plans)
    assert not any(each.fault for each in found), "\n".join(shown(each) for each in found if each.fault)


def test_a_seed_makes_one_program(wide: object) -> None:
    case = case_of(3)
    first, second = program_of(case), program_of(case)
    assert first is not None and second is not None
    assert first.source == second.source
