"""Memory: the published values, and what any plan has to keep to."""

from __future__ import annotations

import msgspec
import pytest

import unisono as un
from inside_planner import (
    PlanModel,
    RankElements,
    TrainingJob,
    in_flight,
    layer_activations,
    model_states,
    stage_layers,
)
from loops import each
from unisono.planner import TrainingPlan, shape_of

GIB = 1 << 30
# Korthikanti et al., 2022, arXiv:2205.05198: layers, hidden, heads, tensor, pipeline, batch, micro-batch,
# interleave; GiB of parameters with optimizer, of activations, and with sequence=yes, recompute=selective.
PUBLISHED = {
    "22B": ((48, 6144, 64, 8, 1, 4, 4, 1), 45.5625, 59.25, 9.5625),
    "175B": ((96, 12288, 96, 8, 8, 64, 1, 3), 45.5625, 66.84375, 12.3515625),
    "530B": ((105, 20480, 128, 8, 35, 280, 1, 3), 31.640625, 114.0234375, 23.076171875),
    "1T": ((128, 25600, 160, 8, 64, 512, 1, 1), 32.958984375, 131.25, 26.5625),
}


def job_of(shape: un.planner.TransformerShape, plan: TrainingPlan, batch: int, **given: str) -> TrainingJob:
    return un.plan(shape, batch=batch, gpus=plan.ranks, hardware="a100-80g", plan=str(plan), **given).job


@each("name", PUBLISHED)
def test_the_published_values_are_exact(name: str) -> None:
    row, states, kept, selective = PUBLISHED[name]
    layers, hidden, heads, tensor, pipeline, batch, micro_batch, interleave = row
    shape = shape_of("gpt", layers=layers, hidden=hidden, heads=heads, vocab=51200, sequence=2048)
    plan = TrainingPlan(tensor=tensor, pipeline=pipeline, interleave=interleave, micro_batch=micro_batch)
    job = job_of(shape, plan, 2 * batch)  # with one micro-batch the peak may be where backward has ended
    matrices = layers // pipeline * shape.matrices(tensor)
    assert sum(model_states(RankElements(matrices), plan, job)) == states * GIB
    assert PlanModel(job).memory(plan).use.activations == pytest.approx(kept * GIB, rel=1e-12)
    both = msgspec.structs.replace(plan, sequence=True, recompute="selective")
    assert PlanModel(job).memory(both).use.activations == pytest.approx(selective * GIB, rel=1e-12)


@each(
    "elements, ranks, cells",
    [
        (7.5e9, 4, (120, 52.5, 41.3, 30)),
        (7.5e9, 64, (120, 31.4, 16.6, 1.88)),
        (128e9, 256, (2048, 518, 263, 8)),
        (1e12, 64, (16000, 4187, 2218, 250)),
        (1e12, 1024, (16000, 4011, 2013, 15.6)),
    ],
)
def test_the_table_of_zero_is_exact(elements: float, ranks: int, cells: tuple[float, ...]) -> None:
    """Rajbhandari et al., 2020, arXiv:1910.02054, table 1, to the last digit."""
    shape = shape_of("gpt", layers=2, hidden=64, heads=4, vocab=100, sequence=32)
    job = job_of(shape, TrainingPlan(data=ranks), ranks, reduce="low")
    for stage, published in enumerate(cells):
        found = sum(model_states(RankElements(elements), TrainingPlan(data=ranks, zero=stage), job)) / 1e9
        assert abs(found - published) < 10.0 ** -len(str(published).partition(".")[2])


def test_all_parameters_are_on_some_rank() -> None:
    """The first and the last rank of a pipeline have a shared table each."""
    shape = shape_of("gpt", layers=12, hidden=768, heads=12, vocab=50257, sequence=1024, positions=1024)
    job = job_of(shape, TrainingPlan(), 1)
    assert PlanModel(job).memory(TrainingPlan()).use.parameters == 2 * shape.parameters


@each("layers", [4, 7, 96, 126])
@each("pipeline, interleave", [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 6), (16, 1)])
def test_stages_have_all_layers(layers: int, pipeline: int, interleave: int) -> None:
    if pipeline * interleave > layers:
        return
    first, middle, last = stage_layers(layers, TrainingPlan(pipeline=pipeline, interleave=interleave))
    assert min(first, last) >= 1
    assert max(first, last) <= middle
    if pipeline <= 2:
        assert layers == (first if pipeline == 1 else first + last)
    else:
        assert first + last + (pipeline - 2) * middle >= layers


def test_llama_has_a_layer_less_at_both_ends() -> None:
    assert stage_layers(126, TrainingPlan(pipeline=16)) == (7, 8, 7)


def test_two_ranks_have_no_middle() -> None:
    """Ten layers in 2 x 3 stages: each rank has five, not six."""
    assert stage_layers(10, TrainingPlan(pipeline=2, interleave=3)) == (5, 5, 5)


def test_fewer_micro_batches_than_stages_keep_fewer() -> None:
    assert in_flight(TrainingPlan(pipeline=8), 0, 3) == 3
    assert in_flight(TrainingPlan(pipeline=8), 7, 300) == 1


@each("name", ["gpt", "llama"])
def test_every_saving_saves(name: str) -> None:
    shape = shape_of(name, layers=8, hidden=512, heads=8, vocab=1000, sequence=256)
    plan = TrainingPlan(data=4, tensor=2)
    job = job_of(shape, plan, 64)

    def kept(**changes: object) -> float:
        return layer_activations(shape, msgspec.structs.replace(plan, **changes), 2)

    assert kept(sequence=True) < kept()
    assert kept(recompute="full") < kept()
    assert kept(micro_batch=2) == 2 * kept()
    totals = [PlanModel(job).memory(msgspec.structs.replace(plan, zero=zero)).use for zero in range(4)]
    states = [use.parameters + use.gradients + use.moments for use in totals]
    assert states == sorted(states, reverse=True)
    assert len(set(states)) == 4


@each("zero, elements_bytes", [(2, 4), (3, 4 + 2)])
def test_zero_has_one_table_whole_while_it_is_at_work(zero: int, elements_bytes: int) -> None:
    """The output matrix of Llama 3 8B has 525 million elements, a layer 218."""
    numbers = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "sequence": 8192}
    small, large = (shape_of("llama", **numbers, vocab=vocab) for vocab in (1024, 128256))
    plan = TrainingPlan(data=8, zero=zero)
    buffers = [PlanModel(job_of(shape, plan, 8)).memory(plan).use.buffers for shape in (small, large)]
    layer = small.matrices() + small.vectors()
    assert buffers[0] == layer * (elements_bytes + (2 if zero == 3 else 0))
    assert buffers[1] - buffers[0] == (128256 * 4096 - layer) * elements_bytes


@each(
    "layers, hidden, heads, batch, sequence, seen",
    [
        (12, 768, 12, 16, 1024, 16.02),
        (24, 1024, 16, 16, 1024, 27.46),
        (24, 1536, 16, 8, 1024, 24.73),
        (24, 2048, 16, 8, 1024, 35.34),
        (24, 2048, 16, 4, 2048, 35.36),
    ],
)
def test_one_step_on_a_gpu_has_the_measured_peak(
    layers: int, hidden: int, heads: int, batch: int, sequence: int, seen: float
) -> None:
    """GiB on an H100, of PyTorch's operators under autocast: benchmarks/results/2026-11-26-gpu.md."""
    shape = shape_of(
        "gpt", layers=layers, hidden=hidden, heads=heads, vocab=50304, sequence=sequence, dropout=False,
        attention="fused",
    )  # fmt: skip
    plan = f"micro_batch={batch},zero=0"
    choice = un.plan(shape, batch=batch, gpus=1, hardware="h100-80g", plan=plan, autocast=True)
    assert choice.memory_bytes == pytest.approx(seen * GIB, rel=0.01)


def test_a_fused_loss_keeps_the_logits_in_f32() -> None:
    shape = shape_of("gpt", layers=2, hidden=64, heads=4, vocab=50304, sequence=1024)
    for compute, more in (("bf16", 12 - 4), ("f32", 16 - 4)):
        ends = [
            un.plan(
                shape, batch=2, gpus=1, hardware="a100-80g", plan="micro_batch=1", compute=compute, loss=loss
            ).chosen.memory.ends
            for loss in ("eager", "fused")
        ]
        assert ends[0] - ends[1] == more * 1024 * 50304
    for wrong, error in (
        ({"loss": "slow"}, ValueError),
        ({"loss": 1}, TypeError),
        ({"autocast": "yes"}, TypeError),
    ):
        with pytest.raises(error):
            un.plan(shape, batch=2, gpus=1, hardware="a100-80g", **wrong)
