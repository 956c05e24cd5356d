"""The search is that of all plans, one by one; a choice says why."""

from __future__ import annotations

import itertools
import json
import random
import time

import msgspec
import numpy as np
import pytest

import unisono as un
from effort import LONG, cases, times
from inside_planner import (
    MOST_TAIL,
    RECOMPUTE,
    SCHEDULES,
    SWAPS,
    PlanModel,
    PlanTree,
    TrainingJob,
    divisors,
    interconnect_of,
    price,
    search,
)
from loops import each
from unisono.planner import ExpertShape, NoPlanFitsError, TrainingPlan, find_hardware, shape_of

GIB = 1 << 30
LLAMA_405B = shape_of(
    "llama", layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, sequence=8192
)


def random_job(seed: int) -> TrainingJob:
    """A small space: any shape, hardware, batch and limit."""
    draw = random.Random(seed)
    heads = draw.choice([2, 3, 4, 6, 8])
    layers = draw.randint(*((1, 9) if LONG else (1, 6)))
    experts = None
    if draw.random() < 0.4:
        count = draw.choice([2, 4, 6, 8])
        experts = ExpertShape(
            count=count,
            top_k=draw.randint(1, count),
            ffn=draw.choice([96, 384]),
            shared_ffn=draw.choice([0, 96]),
            dense_layers=draw.choice([0, 0, min(layers, 2), layers]),
        )
    shape = shape_of(
        draw.choice(["gpt", "llama"]),
        layers=layers,
        hidden=heads * draw.choice([16, 64, 128]),
        heads=heads,
        kv_heads=draw.choice(divisors(heads)),
        ffn=draw.choice([0, 96, 1024]),
        vocab=draw.randint(10, 50000),
        sequence=draw.choice([8, 128, 1000, 2048]),
        experts=experts,
    )
    ranks = draw.choice([1, 2, 3, 4, *cases([6, 8], [12, 16, 24])])
    hardware = find_hardware(draw.choice(["a100-80g", "h100-80g", "v100-32g"]))
    if draw.random() < 0.3:
        hardware = msgspec.structs.replace(hardware, host=None)
    if draw.random() < 0.3:
        hardware = msgspec.structs.replace(hardware, ranks=draw.choice([2, 3, 4]))
    return TrainingJob(
        shape=shape,
        hardware=hardware,
        links=interconnect_of(hardware, None, ranks),
        batch=draw.choice([1, 2, 6, 8, *cases([12], [24, 32, 48])]),
        ranks=ranks,
        limit_bytes=round(10 ** draw.uniform(6, 10.5)),
        compute=hardware.compute,
        reduce=draw.choice(["f32", "low"]),
        overlap=draw.random() < 0.5,
        codecs=draw.choice([(), (), ("bf16", "int8"), ("rank2",)]),
        imbalance=draw.choice([1.0, 1.3]),
    )


def all_plans(job: TrainingJob) -> list[TrainingPlan]:
    """Every combination of every value, and what the job allows of them.

    What `problem` says of one field alone is looked at before the fields are combined.
    """
    sizes, batches = divisors(job.ranks), divisors(job.batch)
    found = []
    for data, context, tensor, pipeline in itertools.product(sizes, repeat=4):
        if data * context * tensor * pipeline != job.ranks:
            continue
        axes = {"data": data, "context": context, "tensor": tensor, "pipeline": pipeline}
        plain = TrainingPlan(**axes)
        for sequence, expert, micro_batch in itertools.product((False, True), divisors(data), batches):
            fields = {"sequence": sequence, "expert": expert, "micro_batch": micro_batch}
            root = msgspec.structs.replace(plain, **fields)
            if not root.problem(job):
                found += _below(root, job)
    return found


def _below(root: TrainingPlan, job: TrainingJob) -> list[TrainingPlan]:
    """Stages and recomputation, then sharing, swapping and codecs."""
    layers = job.shape.layers
    chunks = [n for n in range(1, layers + 1) if -(-layers // root.pipeline) % n == 0]
    shards = [0, *(n for n in range(2, root.data) if root.data % n == 0)]
    found = []
    for chunk, tail, name, recompute in itertools.product(chunks, range(MOST_TAIL + 1), SCHEDULES, RECOMPUTE):
        stages = msgspec.structs.replace(
            root, interleave=chunk, tail=tail, schedule=name, recompute=recompute
        )
        if stages.problem(job):
            continue
        for zero, shard, swap, codec in itertools.product(range(4), shards, SWAPS, ("none", *job.codecs)):
            plan = msgspec.structs.replace(stages, zero=zero, shard=shard, swap=swap, codec=codec)
            if not plan.problem(job):
                found.append(plan)
    return found


@pytest.mark.timeout(1800)
@each("seed", range(times(60, 1000)))
def test_the_search_is_exact(seed: int) -> None:
    job = random_job(seed)
    plans, model = all_plans(job), PlanModel(job)
    priced = [price(model, plan) for plan in plans]
    fitting = sorted((p for p in priced if not p.excess_bytes), key=lambda p: p.order)
    found = search(PlanModel(job), PlanTree(job, {}), 6)
    assert found.candidates == len(plans)
    assert [p.plan for p in found.best] == [p.plan for p in fitting[:6]]
    if not fitting and plans:
        assert found.smallest is not None
        assert found.smallest.memory.total == min(p.memory.total for p in priced)


@each("fixed", [{"pipeline": 2}, {"context": 2}, {"pipeline": 2, "context": 2}, {"data": 2}, {"tensor": 3}])
def test_a_search_of_fixed_axes_is_exact(fixed: dict[str, int]) -> None:
    """Other axes may then leave no rank for data: with tensor=4 of four ranks there is no pipeline."""
    for seed in range(times(8, 60)):
        job = random_job(seed)
        plans = [plan for plan in all_plans(job) if all(getattr(plan, axis) == fixed[axis] for axis in fixed)]
        priced = sorted((price(PlanModel(job), plan) for plan in plans), key=lambda each: each.order)
        fitting = [each.plan for each in priced if not each.excess_bytes]
        found = search(PlanModel(job), PlanTree(job, fixed), 6)
        assert found.candidates == len(plans)
        assert [each.plan for each in found.best] == fitting[:6]


def test_random_spaces_are_of_all_kinds() -> None:
    jobs = [random_job(seed) for seed in range(60)]
    found = [search(PlanModel(job), PlanTree(job, {}), 6) for job in jobs]
    assert sum(not result.best for result in found) > 3
    assert sum(bool(result.best) for result in found) > 20
    assert max(result.candidates for result in found) > 3000
    best = [priced.plan for result in found for priced in result.best]
    assert any(plan.context > 1 for plan in best)
    assert any(plan.expert > 1 for plan in best)
    assert any(plan.shard for plan in best)
    assert any(plan.schedule == "zb-h1" for plan in best)
    assert any(plan.tail for plan in best)
    assert any(plan.swap != "none" for plan in best)
    assert any(plan.codec != "none" for plan in best)


@each("seed", range(times(12, 200)))
def test_bounds_are_below_all_plans(seed: int) -> None:
    """A bound above one plan could lose it."""
    job = random_job(seed)
    model = PlanModel(job)
    for plan in all_plans(job)[::7]:
        priced, rounding = price(model, plan), 1 + 1e-9
        assert model.least_of_axes_s(plan) <= priced.time.total * rounding
        assert model.least_s(plan) <= priced.time.total * rounding
        assert model.least_of_axes_bytes(plan) <= priced.memory.total * rounding
        assert model.least_bytes(plan) <= priced.memory.total * rounding


@each("batch", cases([2048], [16384]))
def test_a_large_search_is_quick(batch: int) -> None:
    begun = time.process_time()
    choice = un.plan(LLAMA_405B, batch=batch, gpus=16384, hardware="h100-80g", network="dgx_h100")
    assert time.process_time() - begun < 10
    assert choice.fits
    assert choice.candidates > 5000
    assert choice.plan.ranks == 16384


# ---- choices -----------------------------------------------------------------------------------------------

GPT3 = shape_of("gpt", layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)


def test_a_choice_says_why() -> None:
    choice = un.plan(GPT3, batch=128, gpus=64, hardware="a100-80g", fix="context=1")
    assert choice.fits
    assert choice.limit == "matrix"
    assert len(choice.next_best) == 5
    steps = [choice.chosen, *choice.next_best]
    assert [step.time.total for step in steps] == sorted(step.time.total for step in steps)
    assert choice.refused
    for refused in choice.refused:  # slower, too large, or impossible: never better
        assert refused.problem or refused.excess_bytes > 0 or refused.excess_s >= 0
    text = str(choice).splitlines()
    assert len(text) <= 40
    assert max(map(len, text)) <= 120


def test_fixed_fields_are_kept() -> None:
    fixed = {"sequence": False, "recompute": "full", "context": 1}
    choice = un.plan(GPT3, batch=128, gpus=64, hardware="a100-80g", fix=fixed)
    for priced in (choice.chosen, *choice.next_best):
        assert not priced.plan.sequence
        assert priced.plan.recompute == "full"
    free = un.plan(GPT3, batch=128, gpus=64, hardware="a100-80g", fix="context=1")
    assert free.seconds < choice.seconds


def test_one_plan_is_priced() -> None:
    choice = un.plan(
        GPT3, batch=1536, gpus=384, hardware="a100-80g", plan="tensor=8,pipeline=12,recompute=full"
    )
    plan = choice.plan
    assert (plan.data, plan.tensor, plan.pipeline, plan.interleave, plan.zero) == (4, 8, 12, 1, 0)
    given = un.plan(GPT3, batch=1536, gpus=384, hardware="a100-80g", plan=str(plan))
    assert given.seconds == choice.seconds
    assert given.candidates == 1


def test_a_plan_that_does_not_fit_is_priced_and_says_so() -> None:
    choice = un.plan(GPT3, batch=8, gpus=8, hardware="a100-80g", plan="tensor=8")
    assert not choice.fits
    assert "DOES NOT FIT" in str(choice)
    assert "efficiencies of a100-80g: fitted on two rows" in str(choice)


def test_no_plan_fits_names_the_smallest() -> None:
    with pytest.raises(
        NoPlanFitsError, match=r"no plan fits 76.00 GiB: of [\d,]+ the smallest needs \d+.\d+ GiB, data="
    ):
        un.plan(GPT3, batch=8, gpus=8, hardware="a100-80g")


@each(
    "given, message",
    [
        ({"gpus": 0}, "gpus is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"hardware": "tpu"}, "no hardware 'tpu'"),
        ({"hardware": "a100-80g:8,v100-32g:8"}, "hosts that differ are given as hosts"),
        ({"network": "nowhere"}, "no network 'nowhere'"),
        ({"memory": 0}, "memory is 0"),
        ({"memory": 500 << 30}, "memory is 500.00 GiB, and a100-80g has 80.00 GiB"),
        ({"compute": "fp8"}, "no rate for 'fp8'"),
        ({"reduce": "bf16"}, "reduce is 'bf16'"),
        ({"plan": "tensor=5"}, "5 ranks, and there are 8"),
        ({"plan": "tensor=8,pipeline=2"}, "16 ranks, and there are 8"),
        ({"plan": "tensor=8,tensor=8"}, "twice"),
        ({"plan": "width=8"}, "expected FIELD=VALUE"),
        ({"plan": "tensor=8 zero=1"}, "write a comma between two of them"),
        ({"fix": "pipeline=16"}, "no plan of 8 ranks has pipeline=16: data x tensor x pipeline = 1 x 1 x 16"),
        ({"plan": "context=3"}, "2 x 3 x 1 x 1 = 6 ranks, and there are 8"),
        ({"plan": "context=2,tensor=8"}, "data x context x tensor x pipeline = 1 x 2 x 8 x 1"),
        ({"plan": "expert=2"}, "no experts"),
        ({"plan": "shard=2"}, "shard=2 needs zero > 0"),
        ({"plan": "schedule=zb-h1"}, "zb-h1 needs a pipeline"),
        ({"plan": "schedule=gpipe"}, "expected 1f1b, zb-h1"),
        ({"plan": "tail=1"}, "tail=1 needs a pipeline"),
        ({"plan": "pipeline=8,tail=40"}, "tail=40 needs a pipeline"),
        ({"plan": "swap=states,zero=1"}, "no axis but data"),
        ({"plan": "codec=int8,zero=1"}, "codec=int8 needs copies of whole gradients"),
        ({"plan": "codec=int8", "reduce": "low"}, "takes gradients in f32"),
        ({"plan": "codec=rank0"}, "rank1 to rank1024"),
        ({"codecs": ["zip"]}, "codec is 'zip'"),
        ({"codecs": ["none"]}, "none beside"),
        ({"imbalance": 0.9}, "expected 1 or more"),
        ({"plan": "tensor"}, "whole number"),
        ({"plan": "tensor=-8"}, "whole number"),
        ({"plan": "zero=4"}, "zero is 4"),
        ({"plan": "recompute=some"}, "recompute is 'some'"),
        ({"plan": "sequence=maybe"}, "yes or no"),
        ({"plan": "sequence=yes"}, "needs tensor > 1"),
        ({"plan": "tensor=8,zero=1"}, "needs data > 1"),
        ({"plan": "micro_batch=3"}, "cannot be cut"),
        ({"plan": {"width": 8}}, "'width' is unknown"),
        ({"plan": "tensor=8", "fix": "zero=1"}, "one or the other"),
        ({"fix": "tensor=7"}, "no plan of 8 ranks"),
        ({"fix": {"sequence": True, "tensor": 1}}, "has sequence=yes,tensor=1: sequence=yes needs"),
        (
            {"fix": "tensor=5,zero=1"},
            "no plan of 8 ranks has tensor=5,zero=1: data x tensor x pipeline = 1 x 5",
        ),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        un.plan(GPT3, **{"batch": 8, "gpus": 8, "hardware": "a100-80g", **given})


@each(
    "given",
    [
        {"shape": 1},
        {"hardware": 1},
        {"network": 1},
        {"gpus": 1.5},
        {"plan": 8},
        {"fix": []},
        {"compute": []},
        {"overlap": 1},
        {"plan": {"tensor": "8"}},
        {"memory": "80G"},
        {"codecs": "int8"},
        {"codecs": [8]},
        {"imbalance": "2"},
    ],
)
def test_arguments_of_other_types_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        un.plan(**{"shape": GPT3, "batch": 8, "gpus": 8, "hardware": "a100-80g", **given})


def test_selective_recomputation_needs_unfused_attention() -> None:
    with pytest.raises(ValueError, match="this attention is fused"):
        un.plan(LLAMA_405B, batch=8, gpus=8, hardware="h100-80g", plan="tensor=8,recompute=selective")


def test_whole_numbers_of_numpy_are_python_numbers() -> None:
    """A product of int32 overflows, and JSON has no NumPy numbers."""
    numbers = {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 51200, "sequence": 2048}
    shape = shape_of("gpt", **{name: np.int32(number) for name, number in numbers.items()})
    given = {"batch": np.int32(64), "gpus": np.int64(64), "memory": np.int64(76 << 30)}
    choice = un.plan(shape, **given, hardware="a100-80g", plan={"tensor": np.int32(8), "pipeline": True})
    assert shape.parameters == GPT3.parameters
    assert json.loads(json.dumps(choice.record()))["plan"]["tensor"] == 8
    assert "pipeline=1" in str(choice)
