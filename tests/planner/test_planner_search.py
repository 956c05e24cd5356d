"""The search is that of all plans, one by one, on equal hosts and on others; a choice says why."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

import unisono as un
from effort import LONG, TEST_S, cases, times
from inside_planner import (
    MOST_TAIL,
    RECOMPUTE,
    SCHEDULES,
    SWAPS,
    PlanModel,
    PlanTree,
    TrainingJob,
    divisors,
    find_cluster,
    interconnect_of,
    price,
    search,
)
from loops import each
from unisono.planner import ExpertShape, Hardware, NoPlanFitsError, TrainingPlan, find_hardware, shape_of

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
                found += (_below if job.cluster is None else _on_hosts)(root, job)
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


def small(name: str, ranks: int, **changes: object) -> Hardware:
    """Shipped hardware with other numbers of ranks of a host."""
    return msgspec.structs.replace(find_hardware(name), ranks=ranks, host=None, **changes)


def random_hosts(seed: int) -> TrainingJob:
    """A small space of two or three kinds of hosts."""
    draw = random.Random(seed)
    heads = draw.choice([2, 4, 6])
    experts = ExpertShape(count=4, top_k=2, ffn=96) if draw.random() < 0.25 else None
    shape = shape_of(
        draw.choice(["gpt", "llama"]),
        layers=draw.randint(1, 6),
        hidden=heads * draw.choice([16, 64]),
        heads=heads,
        vocab=draw.randint(10, 50000),
        sequence=draw.choice([8, 128, 1000]),
        experts=experts,
    )
    names = draw.sample(["a100-40g", "a100-80g", "h100-80g", "v100-32g"], draw.choice([2, 2, 3]))
    pairs = [(1, small(name, draw.choice([1, 1, 2]))) for name in names]
    cluster = find_cluster(pairs)
    slowest = cluster.slowest()
    return TrainingJob(
        shape=shape,
        hardware=slowest,
        links=interconnect_of(slowest, None, cluster.ranks),
        batch=draw.choice([1, 4, 6, 8, 12]),
        ranks=cluster.ranks,
        limit_bytes=slowest.usable_bytes,
        compute="fp16",
        reduce=draw.choice(["f32", "low"]),
        overlap=draw.random() < 0.5,
        cluster=_limited(draw, cluster),
    )


def _limited(draw: random.Random, cluster: object) -> object:
    """The same hosts, with random limits."""
    kinds = [
        kind._replace(
            hardware=msgspec.structs.replace(
                kind.hardware, memory_bytes=round(10 ** draw.uniform(6.5, 9.5)), reserved_bytes=0
            )
        )
        for kind in cluster.kinds  # type: ignore[attr-defined]
    ]
    return cluster._replace(kinds=tuple(kinds))  # type: ignore[attr-defined]


def _on_hosts(root: TrainingPlan, job: TrainingJob) -> list[TrainingPlan]:
    assert job.cluster is not None
    found, shards = [], [0, *(n for n in range(2, root.data) if root.data % n == 0)]
    orders = job.cluster.orders if root.pipeline > 1 else [()]
    for order, chunk, recompute in itertools.product(orders, range(1, 7), RECOMPUTE):
        if root.pipeline == 1 and chunk > 1:
            continue
        base = msgspec.structs.replace(root, order=order, interleave=chunk, recompute=recompute)
        for stages in _stages(base, job):
            if not stages.problem(job):
                for zero, shard in itertools.product(range(4), shards):
                    plan = msgspec.structs.replace(stages, zero=zero, shard=shard)
                    if not plan.problem(job):
                        found.append(plan)
    return found


def _stages(base: TrainingPlan, job: TrainingJob) -> list[TrainingPlan]:
    """With all layers that the rule of `search` allows, among all that there are, or all rows."""
    assert job.cluster is not None
    layers, pipeline = job.shape.layers, base.pipeline
    if pipeline > 1:
        if -(-layers // pipeline) % base.interleave:
            return []
        blocks = job.cluster.blocks(base.order, pipeline)
        for at in range(1, pipeline):
            if len(blocks[at]) > 1:
                blocks[at] = blocks[at - 1]
        tried = itertools.product(range(1, layers + 1), repeat=pipeline)
        kept = [c for c in tried if sum(c) == layers and _balanced(c, blocks, base.interleave)]
        return [msgspec.structs.replace(base, layers=each_) for each_ in kept]
    found = [base]
    count = len(job.cluster.kinds)
    for rows in itertools.product(range(1, job.batch + 1), repeat=count):
        if len(set(rows)) > 1:
            found.append(msgspec.structs.replace(base, rows=rows))
    return found


def _balanced(layers: tuple[int, ...], blocks: list[tuple[int, ...]], unit: int) -> bool:
    if any(count % unit for count in layers):
        return False
    for tail in range(MOST_TAIL + 1 if len(set(blocks)) < 3 else 1):
        counts = [count // unit for count in layers]
        counts[-1] += tail
        of = {kind: [c for c, b in zip(counts, blocks, strict=True) if b == kind] for kind in blocks}
        last = of.pop(blocks[-1])
        rest = [last[0] - count for count in last]
        if all(len(set(each_)) == 1 for each_ in of.values()) and _ends_lower(rest):
            return True
    return False


def _ends_lower(rest: list[int]) -> bool:
    return rest == sorted(rest) and set(rest) <= {0, 1}


@pytest.mark.timeout(1800 if LONG else TEST_S)
@each(
    "made, seed",
    [(random_job, seed) for seed in range(times(40, 1000))]
    + [(random_hosts, seed) for seed in range(times(15, 400))],
)
def test_the_search_is_exact(made: Callable[[int], TrainingJob], seed: int) -> None:
    job = made(seed)
    plans, model = all_plans(job), PlanModel(job)
    priced = [price(model, plan) for plan in plans]
    fitting = sorted((p for p in priced if not p.excess_bytes), key=lambda p: p.order)
    found = search(PlanModel(job), PlanTree(job, {}), 6)
    assert found.candidates == len(plans)
    assert [p.plan for p in found.best] == [p.plan for p in fitting[:6]]
    if plans and not fitting:
        assert found.smallest is not None
        excess = [p.memory.total - p.limit_bytes for p in priced]
        assert found.smallest.memory.total - found.smallest.limit_bytes == min(excess)
    for one in priced[::11]:  # a bound above a plan could lose it
        plan, rounding = one.plan, 1 + 1e-9
        assert model.least_of_axes_s(plan) <= one.time.total * rounding
        assert model.least_s(plan) <= one.time.total * rounding
        used = one.memory.total - one.limit_bytes + job.limit_bytes
        assert model.least_of_axes_bytes(plan) <= used + 1e-6 * abs(used)
        assert model.least_bytes(plan) <= used + 1e-6 * abs(used)


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
    found = [search(PlanModel(job), PlanTree(job, {}), 6) for job in map(random_hosts, range(25))]
    best = [priced.plan for result in found for priced in result.best]
    assert any(plan.rows for plan in best)
    assert any(len(set(plan.layers)) > 1 for plan in best)
    assert any(plan.order and plan.order != tuple(sorted(plan.order)) for plan in best)
    assert any(not result.best and result.smallest for result in found)


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
