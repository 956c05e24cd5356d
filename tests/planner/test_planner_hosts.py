"""Hosts that differ: the search is that of all plans, a pipeline's pace that of its schedule."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

import unisono as un
from inside_planner import uneven_layers, uneven_rows, with_layers
from loops import each
from unisono.commands import cli
from unisono.planner import NoPlanFitsError, find_hardware, shape_of

GIB = 1 << 30
LLAMA_8B = shape_of(
    "llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=8192
)
HOSTS = "4xa100-40g,2xh100-80g"


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


def test_many_layers_on_three_kinds_of_hosts_are_cut_in_larger_steps() -> None:
    """More ways than are tried are no reason to leave pipelines out: 140 layers on three ranks once were."""
    found = uneven_layers(((0,), (1,), (2,)), 1, 140)
    assert 2_000 < len(found) <= 1 << 14
    assert all(sum(layers) == 140 for layers in found)
    assert (46, 46, 48) in found  # equal ones


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
