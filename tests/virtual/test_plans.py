"""Parallel training on virtual GPUs."""

from pathlib import Path
from typing import Any

import pytest

from effort import swept

PROGRAMS = Path(__file__).resolve().parents[1] / "torch" / "programs"
CENSUS = Path(__file__).resolve().parents[1] / "torch" / "memory_census.py"
MEMORY = Path(__file__).resolve().parent / "programs"


@pytest.mark.parametrize("machine", [4], indirect=True)
def test_plans_have_the_losses_of_one_process_on_the_cpu(machine: Any) -> None:
    ended = machine.run(PROGRAMS / "plans.py", arguments=["nccl"])
    assert not any(ended.codes), ended.text
    assert ended.text.count("Plan(") == 10


@pytest.mark.parametrize("machine", [2], indirect=True)
@pytest.mark.parametrize("backend", swept(["nccl"], ["unisono"]))
def test_optimizers_take_tensors_that_are_cut_beside_others(machine: Any, backend: str) -> None:
    ended = machine.run(PROGRAMS / "optimizers.py", arguments=[backend])
    assert not any(ended.codes), ended.text


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_a_dry_run_has_the_peak_of_the_allocator(machine: Any) -> None:
    texts = swept(
        [
            "data=2,zero=3,precision='bf16',reduce='low'",
            "pipeline=2,micro_batches=4,cuts=(2,),schedule='zb-h1'",
        ],
        [
            "data=2,zero=3",
            "data=2,zero=1,precision='bf16',reduce='low',micro_batches=2",
            "data=2,local_steps=1",
            "data=2,precision='autocast'",
            "data=2",
            "data=2,zero=2,precision='bf16'",
            "pipeline=2,micro_batches=4,cuts=(2,)",
            "pipeline=2,micro_batches=2,cuts=(1,2,3),schedule='interleaved',precision='bf16'",
        ],
    )
    texts.append("pipeline=2,micro_batches=3,cuts=(2,),zero=3,precision='bf16',recompute=True")
    ended = machine.run(MEMORY / "planned_memory.py", arguments=texts)
    assert not any(ended.codes), ended.text
    assert ended.text.count("Plan(") == 2 * 2 * len(texts), ended.text


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_a_dry_run_knows_the_copies_that_fully_shard_makes_of_gradients(machine: Any) -> None:
    ended = machine.run(MEMORY / "copies_of_gradients.py")
    assert not any(ended.codes), ended.text
    assert "as said" in ended.text


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_a_model_on_the_meta_device_is_cut_by_positions(machine: Any) -> None:
    ended = machine.run(MEMORY / "context_on_meta.py")
    assert not any(ended.codes), ended.text
    assert "the losses agree" in ended.text


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("machine", [2], indirect=True)
def test_plans_run_in_the_memory_that_a_dry_run_says(machine: Any, seed: int) -> None:
    ended = machine.run(MEMORY / "near_the_limit.py", arguments=[str(seed), "10"])
    assert not any(ended.codes), ended.text
    assert "10 of 10 plans that fit ran" in ended.text, ended.text


@pytest.mark.sweep
@pytest.mark.parametrize("machine", [1, 2, 4, 8], indirect=True)
def test_dry_runs_have_the_peaks_of_the_sweep(machine: Any) -> None:
    ended = machine.run(CENSUS, limit_s=3500, arguments=["sweep"])
    assert not any(ended.codes), ended.text
    assert " 0 missed, 0 refused" in ended.text, ended.text


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_a_step_waits_once_for_the_device_and_an_update_never(machine: Any) -> None:
    ended = machine.run(MEMORY / "waits.py", arguments=["unisono"])
    assert not any(ended.codes), ended.text
    assert ended.text.count("Plan(") == 2 * 5
