"""Hosts that differ: the search is that of all plans, a pipeline's pace that of its schedule."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import msgspec
import pytest

import unisono as un
from effort import times
from inside_planner import (
    MOST_TAIL,
    RECOMPUTE,
    PlanModel,
    PlanTree,
    TrainingJob,
    divisors,
    find_cluster,
    interconnect_of,
    price,
    search,
    uneven_layers,
    uneven_rows,
    with_layers,
)
from loops import each
from unisono.commands import cli
from unisono.planner import ExpertShape, Hardware, NoPlanFitsError, TrainingPlan, find_hardware, shape_of

GIB = 1 << 30
LLAMA_8B = shape_of(
    "llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=8192
)
HOSTS = "4xa100-40g,2xh100-80g"


def small(name: str, ranks: int, **changes: object) -> Hardware:
    """Shipped hardware with other numbers of ranks of a host."""
    return msgspec.structs.replace(find_hardware(name), ranks=ranks, host=None, **changes)


def random_job(seed: int) -> TrainingJob:
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


def all_plans(job: TrainingJob) -> list[TrainingPlan]:
    """Every combination of values that the job allows."""
    sizes, found = divisors(job.ranks), []
    for data, context, tensor, pipeline in itertools.product(sizes, repeat=4):
        if data * context * tensor * pipeline != job.ranks:
            continue
        for sequence, expert, micro_batch in itertools.product(
            (False, True), divisors(data), divisors(job.batch)
        ):
            root = TrainingPlan(
                data=data, context=context, tensor=tensor, pipeline=pipeline, sequence=sequence,
                expert=expert, micro_batch=micro_batch,
            )  # fmt: skip
            if not root.problem(job):
                found += _below(root, job)
    return found


def _below(root: TrainingPlan, job: TrainingJob) -> list[TrainingPlan]:
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


@pytest.mark.timeout(1800)
@each("seed", range(times(25, 400)))
def test_the_search_is_exact(seed: int) -> None:
    job = random_job(seed)
    model, plans = PlanModel(job), all_plans(job)
    priced = [price(model, plan) for plan in plans]
    fitting = sorted((p for p in priced if not p.excess_bytes), key=lambda p: p.order)
    found = search(PlanModel(job), PlanTree(job, {}), 6)
    assert found.candidates == len(plans)
    assert [p.plan for p in found.best] == [p.plan for p in fitting[:6]]
    if plans and not fitting:
        assert found.smallest is not None
        excess = [p.memory.total - p.limit_bytes for p in priced]
        assert found.smallest.memory.total - found.smallest.limit_bytes == min(excess)
    for plan in plans[::11]:
        one, rounding = price(model, plan), 1 + 1e-9
        assert model.least_of_axes_s(plan) <= one.time.total * rounding
        assert model.least_s(plan) <= one.time.total * rounding
        used = one.memory.total - one.limit_bytes + job.limit_bytes
        assert model.least_of_axes_bytes(plan) <= used + 1e-6 * abs(used)
        assert model.least_bytes(plan) <= used + 1e-6 * abs(used)


def test_random_spaces_are_of_all_kinds() -> None:
    jobs = [random_job(seed) for seed in range(25)]
    found = [search(PlanModel(job), PlanTree(job, {}), 6) for job in jobs]
    best = [priced.plan for result in found for priced in result.best]
    assert any(plan.rows for plan in best)
    assert any(len(set(plan.layers)) > 1 for plan in best)
    assert any(plan.order and plan.order != tuple(sorted(plan.order)) for plan in best)
    assert any(not result.best and result.smallest for result in found)


# ---- a pipeline ------------------------------------------------------------------------------------------


def one_f_one_b(forward: list[float], backward: list[float], count: int) -> float:
    """Seconds of 1F1B by its own rule: a stage does what is next in its order once its input is there."""
    size = len(forward)
    orders = []
    for stage in range(size):
        ahead = min(size - stage - 1, count)
        order = [("f", at) for at in range(ahead)]
        for at in range(count):
            order += [("f", at + ahead)] * (at + ahead < count) + [("b", at)]
        orders.append(order)
    ends: dict[tuple[str, int, int], float] = {}
    free, places = [0.0] * size, [0] * size
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                kind, at = order[places[stage]]
                before = (kind, at, stage + (1 if kind == "b" else -1))
                inner = 0 <= before[2] < size
                if inner and before not in ends:
                    break
                begun = max(free[stage], ends[before] if inner else 0.0)
                free[stage] = begun + (forward if kind == "f" else backward)[stage]
                ends[kind, at, stage] = free[stage]
                places[stage] += 1
    return max(free)


@each("seed", range(12))
def test_the_pace_is_that_of_the_schedule(seed: int) -> None:
    """All micro-batches of the slowest stage, and one of each other stage."""
    draw = random.Random(seed)
    size, count = draw.randint(2, 6), draw.choice([6, 12, 24])
    forward = [draw.uniform(0.5, 2) for _ in range(size)]
    total = [3 * each_ for each_ in forward]
    found = one_f_one_b(forward, [2 * each_ for each_ in forward], count)
    assert found == pytest.approx((count - 1) * max(total) + sum(total), rel=0.08)


def test_equal_hosts_of_two_names_are_equal_hosts() -> None:
    twice = find_hardware("a100-80g"), msgspec.structs.replace(find_hardware("a100-80g"), name="other")
    for text in ("tensor=4,pipeline=4,zero=1", "tensor=4,pipeline=1,zero=2", "context=2,tensor=8,pipeline=2"):
        one = un.plan(LLAMA_8B, batch=32, gpus=32, hardware="a100-80g", plan=f"{text},micro_batch=1")
        other = un.plan(
            LLAMA_8B, batch=32, hosts=[(2, twice[0]), (2, twice[1])], plan=f"{text},micro_batch=1"
        )
        assert other.seconds == pytest.approx(one.seconds, rel=1e-3)
        assert other.memory_bytes == one.memory_bytes


# ---- choices ---------------------------------------------------------------------------------------------


def test_each_host_has_what_it_can() -> None:
    choice = un.plan(LLAMA_8B, batch=96, hosts=HOSTS, fix="context=1,tensor=1,micro_batch=1,shard=0")
    assert choice.fits
    assert sum(with_layers(choice.job, choice.plan).layers or (32,)) == 32
    by = {use.hosts: use for use in choice.hosts}
    slow, fast = by["4 x a100-40g"], by["2 x h100-80g"]
    assert min(fast.layers) > 2 * max(slow.layers)
    assert all(use.memory_bytes <= use.limit_bytes for use in choice.hosts)
    assert (slow.limit_bytes, fast.limit_bytes) == (37 * GIB, 76 * GIB)
    equal = next(other for other in choice.refused if other.change == "layers=equal")
    assert equal.excess_s > 0.2 * choice.seconds
    assert choice.record()["hosts"][0]["layers"] == choice.hosts[0].layers
    again = json.loads(json.dumps(choice.record()))["plan"]
    assert un.plan(LLAMA_8B, batch=96, hosts=HOSTS, plan=again).seconds == choice.seconds
    text = str(choice)
    assert "48 on hosts 4 x a100-40g + 2 x h100-80g" in text
    assert "4 x a100-40g; layers" in text


def test_memory_is_that_of_each_host() -> None:
    """A stage that fits an H100 does not fit an A100 of 40 GB."""
    plan = "data=8,tensor=2,pipeline=3,zero=1,micro_batch=4,recompute=full"
    fast = un.plan(LLAMA_8B, batch=96, hosts=HOSTS, plan=f"{plan},order=1/0,layers=26/3/3")
    slow = un.plan(LLAMA_8B, batch=96, hosts=HOSTS, plan=f"{plan},order=0/1,layers=26/3/3")
    assert fast.fits
    assert not slow.fits
    assert slow.limit_bytes == 37 * GIB
    with pytest.raises(NoPlanFitsError, match="smallest needs"):
        un.plan(LLAMA_8B, batch=96, hosts=HOSTS, memory=1 * GIB, fix="context=1,tensor=1")


def test_a_slow_host_gets_fewer_rows(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[[hosts]]\ncount = 3\nhardware = "a100-80g"\n'
        '[[hosts]]\ncount = 1\nhardware = "a100-80g"\nspeed = 0.5\n'
    )
    shape = shape_of("llama", layers=24, hidden=2048, heads=16, vocab=32000, sequence=2048)
    fix = "pipeline=1,tensor=1,context=1"
    choice = un.plan(shape, batch=1792, hosts=file, fix=fix)
    rows = choice.plan.rows
    assert rows[0] == pytest.approx(2 * rows[1], rel=0.35)
    even = un.plan(shape, batch=1792, hosts=file, fix=f"{fix},rows=equal")
    assert choice.seconds < 0.8 * even.seconds
    assert {use.rows for use in choice.hosts} == set(rows)


def test_the_command_plans_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "choice.html"
    hosts = "--hosts 1xa100-40g,1xv100-32g --compute fp16"
    words = f"plan --model gpt2-xl --batch 32 {hosts} --fix context=1,tensor=1 --json -o {file}"
    assert cli.main(words.split()) == 0
    record = json.loads(capsys.readouterr().out)
    assert [each_["hosts"] for each_ in record["hosts"]] == ["1 x a100-40g", "1 x v100-32g"][
        :: -1 if record["plan"]["order"] == [1, 0] else 1
    ]
    assert "on hosts 1 x a100-40g + 1 x v100-32g" in file.read_text()
    assert record["limit_bytes"] in {each_["limit_bytes"] for each_ in record["hosts"]}


def test_layers_are_balanced() -> None:
    assert uneven_layers(((0,), (1,)), 1, 3) == ((1, 2), (2, 1))
    assert (20, 6, 6) in uneven_layers(((1,), (0,), (0,)), 1, 32)
    assert uneven_layers(((0,), (1,)), 2, 3) == ()
    assert uneven_rows((3, 1), 8) == ((), (1, 5))
    for layers in uneven_layers(((0,), (0,), (0, 1), (1,)), 2, 24):
        assert sum(layers) == 24
        assert all(count % 2 == 0 for count in layers)


@each(
    "given, message",
    [
        ({"hosts": "a100-80g"}, "expected such as 4xa100-80g"),
        ({"hosts": ""}, "expected such as"),
        ({"hosts": "a100-80g:8,v100-32g:8"}, "expected such as"),
        ({"hosts": "0xa100-80g"}, "a count is 0"),
        ({"hosts": "1xtpu"}, "no hardware 'tpu'"),
        ({"hosts": "1xa100-80g,1xa100-40g,1xh100-80g,1xv100-32g"}, "4 kinds"),
        ({"hosts": HOSTS, "gpus": 8}, "gpus is 8, and the hosts have 48"),
        ({"hosts": HOSTS, "hardware": "a100-80g"}, "or hardware and network"),
        ({"hosts": HOSTS, "network": "dgx_h100"}, "or hardware and network"),
        ({"hosts": HOSTS, "memory": 90 * GIB}, "the largest of"),
        ({"hosts": HOSTS, "compute": "fp8"}, "no rate for 'fp8'"),
        ({"hosts": HOSTS, "plan": "pipeline=3,layers=10/10"}, "layers=10/10 are not 32 layers"),
        ({"hosts": HOSTS, "plan": "pipeline=3,layers=10/10/11"}, "are not 32 layers"),
        ({"hosts": HOSTS, "plan": "pipeline=3,tail=3"}, "layers in place of tail"),
        ({"hosts": HOSTS, "plan": "order=0/0"}, "each of 0 to 1 once"),
        ({"hosts": HOSTS, "plan": "rows=2"}, "a number for each of 2 kinds"),
        ({"hosts": HOSTS, "plan": "rows=2/1"}, "are 80, expected data x micro_batch"),
        ({"hosts": HOSTS, "plan": "swap=moments"}, "swap"),
        ({"gpus": 8, "hardware": "a100-80g", "plan": "rows=1"}, "rows is for hosts that differ"),
        ({"gpus": 8, "hardware": "a100-80g", "plan": "layers=a"}, "whole number"),
        ({"gpus": 8}, "give gpus and hardware, or hosts"),
    ],
)
def test_wrong_hosts_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        un.plan(LLAMA_8B, **{"batch": 96, **given})


@each("hosts", [5, [1], [("a100-80g", 4)], [(1.5, "a100-80g")], {"a100-80g": 4}, [(1, 2)]])
def test_hosts_of_other_types_are_refused(hosts: object) -> None:
    with pytest.raises(TypeError, match="hosts"):
        un.plan(LLAMA_8B, batch=96, hosts=hosts)  # type: ignore[arg-type]


@each(
    "text, message",
    [
        ("", "lacks [[hosts]]"),
        ("hosts = 4\n", "lacks [[hosts]]"),
        ("[[hosts]]\ncount = 2\n", "lacks hardware"),
        ('[[hosts]]\ncount = 2\nhardware = "a100-80g"\nspeed = 2\n', "expected a share"),
        ('[[hosts]]\ncount = 2\nhardware = "a100-80g"\nspeed = nan\n', "expected a share"),
        ('[[hosts]]\ncount = -2\nhardware = "a100-80g"\n', "count is -2"),
        ('[[hosts]]\ncount = 2\nhardware = "a100-80g"\nmemory = "90 GiB"\n', "expected 1 to"),
        ('[[hosts]]\ncount = 2\nhardware = "a100-80g"\ncores = 2\n', "cores: is unknown"),
        ('[[hosts]]\ncount = 2\nhardware = "nowhere.toml"\n', "nowhere.toml"),
    ],
)
def test_wrong_files_name_the_place(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    assert cli.main(f"plan --model gpt2 --batch 8 --hosts {file}".split()) in (1, 2)
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1
