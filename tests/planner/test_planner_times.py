"""Times: the published steps, prices beside the simulator's, and what any plan has to keep to."""

from __future__ import annotations

import itertools

import msgspec
import pytest

import unisono as un
from inside_planner import PlanChoice, PlanModel, PlanTree, RankLayout, collective_s, interconnect_of, price
from loops import each
from unisono import networks
from unisono.networks import Cable, Costs, Network
from unisono.planner import find_hardware, shape_of
from unisono.plans import ALGORITHMS

A100 = find_hardware("a100-80g")
COSTS = Costs(o_send_s=1e-6, o_recv_s=1e-6)
PORT, INNER = Cable(1e-6, 25e9), Cable(1e-6, 300e9)
ONE_HOST = networks.star(1, ranks=8, cable=PORT, inner=INNER, inside="switch", nics=8, costs=COSTS)
ONE_RANK_EACH = networks.star(8, ranks=1, cable=PORT, costs=COSTS)
ONE_PORT = networks.star(4, ranks=4, cable=PORT, inner=INNER, inside="switch", costs=COSTS)
RAILS = networks.star(2, ranks=8, cable=PORT, inner=INNER, inside="switch", nics=8, costs=COSTS)


def fastest_s(collective: str, network: Network, nbytes: float) -> float:
    """Of all algorithms, in one segment."""
    return min(
        un.simulate(collective, network, algorithm=name, nbytes=nbytes, segment_bytes=int(nbytes)).seconds
        for name in ALGORITHMS[collective]
        if name not in ("linear", "pairwise", "aggregator")
    )


@each("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@each("nbytes", [64e6, 1e9])
@each("network, least", [(ONE_HOST, 0.99), (ONE_RANK_EACH, 0.99), (ONE_PORT, 0.93), (RAILS, 0.6)])
def test_prices_are_those_of_the_simulator(
    collective: str, nbytes: float, network: Network, least: float
) -> None:
    """On one level exact. On two levels the simulated algorithms do not overlap both, as segments would."""
    links = interconnect_of(A100, network, network.size)
    found = collective_s(
        collective, RankLayout.of(network.size, 1, links.ranks, network.size), nbytes, links, 1.0
    )
    assert least <= found / fastest_s(collective, network, nbytes) <= 1.02


@each("collective", ["all_gather", "reduce_scatter"])
@each("network", [ONE_HOST, ONE_RANK_EACH, RAILS])
def test_latencies_are_those_of_the_simulator(collective: str, network: Network) -> None:
    links = interconnect_of(A100, network, network.size)
    found = collective_s(
        collective, RankLayout.of(network.size, 1, links.ranks, network.size), 1000, links, 1.0
    )
    assert found == pytest.approx(fastest_s(collective, network, 1000), rel=0.02)


@each(
    "arguments, layout",
    [
        ((4, 2, 8, 64), (4, 4)),
        ((4, 8, 8, 64), (4, 1)),
        ((8, 4, 8, 64), (8, 2)),
        ((16, 1, 8, 64), (16, 8)),
        ((1, 8, 8, 64), (1, 1)),
        ((3, 1, 8, 24), (3, 2)),  # ranks 6, 7 and 8
        ((6, 1, 8, 24), (6, 3)),
        ((3, 2, 8, 6), (3, 3)),  # one host has all
        ((2, 3, 4, 6), (2, 1)),  # ranks 1 and 4
    ],
)
def test_layouts(arguments: tuple[int, int, int, int], layout: tuple[int, int]) -> None:
    assert RankLayout.of(*arguments) == layout


def test_layouts_have_as_many_hosts_as_the_worst_group() -> None:
    for size, stride, ranks, blocks in itertools.product(
        range(1, 9), range(1, 9), (1, 3, 4, 8), (1, 2, 3, 6)
    ):
        total = size * stride * blocks
        spans = []
        for begin, offset in itertools.product(range(0, total, size * stride), range(stride)):
            group = range(begin + offset, begin + size * stride, stride)
            # Where strides exceed hosts, a group leaves some out.
            spans.append(min(size, group[-1] // ranks - group[0] // ranks + 1))
        assert RankLayout.of(size, stride, ranks, total) == (size, -(-size // max(spans)))


def test_a_tensor_axis_that_does_not_divide_a_host_pays_for_the_port() -> None:
    """24 ranks on hosts of 8: tensor=3 has ranks 6 and 7 on one host and 8 on the next."""
    shape = shape_of("gpt", layers=12, hidden=768, heads=12, vocab=50257, sequence=1024)

    def call_s(tensor: int) -> float:
        choice = un.plan(shape, batch=48, gpus=24, hardware=A100, plan=f"tensor={tensor},micro_batch=1")
        (found,) = [each for each in choice.collectives if each.axis == "tensor"]
        return found.seconds / found.calls

    assert call_s(3) > 2 * call_s(4) > 2 * call_s(2)


def test_shipped_networks_have_the_links_of_their_hardware() -> None:
    links = interconnect_of(A100, networks.find("selene"), 1024)
    assert links.ranks == A100.ranks
    assert links.inside.bytes_per_s == A100.inside.bytes_per_s
    assert links.between.bytes_per_s == A100.between.bytes_per_s


def test_ranks_share_the_port_of_their_host() -> None:
    links = interconnect_of(A100, networks.find("summit"), 48)
    assert links.between.bytes_per_s == pytest.approx(25e9 / 6)


def test_networks_that_cannot_be_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="has 4 ranks, and 8 are needed"):
        interconnect_of(A100, networks.find("two_hosts"), 8)
    uneven = networks.parse(
        '[[host]]\nname = "a"\nranks = 1\n[[host]]\nname = "b"\nranks = 3\n[[host]]\nname = "c"\nranks = 2\n'
        '[[cable]]\nbetween = ["a", "b"]\nrate = "1 GB/s"\n[[cable]]\nbetween = ["b", "c"]\nrate = "1 GB/s"\n'
    )
    with pytest.raises(ValueError, match="hosts that differ"):
        interconnect_of(A100, uneven, 6)


# ---- steps -----------------------------------------------------------------------------------------------

# Korthikanti et al., 2022, arXiv:2205.05198, table 5: the model, its plan, batch, seconds.
MODELS = {
    "22B": ((48, 6144, 64), "tensor=8,micro_batch=4", 4, 1.42, 1.10),
    "175B": ((96, 12288, 96), "tensor=8,pipeline=8,micro_batch=1,interleave=3", 64, 18.13, 13.75),
    "530B": ((105, 20480, 128), "tensor=8,pipeline=35,micro_batch=1,interleave=3", 280, 49.05, 37.83),
    "1T": ((128, 25600, 160), "tensor=8,pipeline=64,micro_batch=1", 512, 94.42, 71.49),
}


def step_of(numbers: tuple[int, int, int], plan: str, batch: int, gpus: int) -> PlanChoice:
    layers, hidden, heads = numbers
    shape = shape_of(
        "gpt", layers=layers, hidden=hidden, heads=heads, vocab=51200, sequence=2048, positions=2048
    )
    return un.plan(shape, batch=batch, gpus=gpus, hardware="a100-80g", plan=plan)


def test_steps_are_the_published_ones() -> None:
    """Two of the eight are fitted; mean error of the others 2.5 %, largest 6 %."""
    errors = []
    for name, (numbers, plan, batch, full_s, selective_s) in MODELS.items():
        gpus = 8 * int(plan.partition("pipeline=")[2].partition(",")[0] or 1)
        full = step_of(numbers, f"{plan},recompute=full", batch, gpus).seconds / full_s - 1
        fitted = name in ("22B", "530B")
        if fitted:
            assert abs(full) < 1e-3
        selective = step_of(numbers, f"{plan},sequence=yes,recompute=selective", batch, gpus).seconds
        errors += [abs(selective / selective_s - 1)] + ([] if fitted else [abs(full)])
    assert len(errors) == 6
    assert sum(errors) / 6 < 0.025
    assert max(errors) < 0.06


@each(
    "numbers, plan, gpus, batch, tflops",
    [
        ((24, 2304, 24), "", 32, 512, 137),
        ((40, 6144, 48), "tensor=8", 256, 1024, 135),
        ((80, 12288, 96), "tensor=8,pipeline=8", 1536, 2304, 148),
        ((128, 25600, 160), "tensor=8,pipeline=64", 3072, 3072, 163),
    ],
)
def test_rates_are_those_of_megatron(
    numbers: tuple[int, int, int], plan: str, gpus: int, batch: int, tflops: float
) -> None:
    """Narayanan et al., 2021, arXiv:2104.04473, table 1."""
    choice = step_of(numbers, ",".join(filter(None, [plan, "recompute=full"])), batch, gpus)
    assert choice.tflops_per_gpu == pytest.approx(tflops, rel=0.10)
    assert choice.fits


SMALL = shape_of("gpt", layers=8, hidden=1024, heads=16, vocab=32000, sequence=512)


@each("hardware", ["a100-80g", "h100-80g", "v100-32g"])
def test_causes_collectives_and_bounds_agree(hardware: str) -> None:
    job = un.plan(SMALL, batch=32, gpus=16, hardware=hardware, plan="").job
    model = PlanModel(job)
    plans = list(PlanTree(job, {}))[::40]
    assert len(plans) > 500
    for plan in plans:
        time = price(model, plan).time
        assert min(time) >= 0
        assert model.least_s(plan) <= time.total * (1 + 1e-9)
        exposed: dict[str, float] = {}
        for each_ in model.collectives(plan):
            assert 0 <= each_.exposed <= each_.seconds * (1 + 1e-9)
            exposed[each_.axis] = exposed.get(each_.axis, 0.0) + each_.exposed
        assert exposed.get("data", 0.0) + exposed.get("replica", 0.0) == pytest.approx(time.data)
        assert exposed.get("pipeline", 0.0) == pytest.approx(time.messages)


@each("plan", ["tensor=4,pipeline=2", "data=8,zero=3,recompute=full", "tensor=2,sequence=yes,zero=2"])
def test_faster_hardware_is_never_slower(plan: str) -> None:
    def seconds(hardware: un.planner.Hardware, **given: object) -> float:
        return un.plan(
            SMALL, batch=32, gpus=8, hardware=hardware, plan=f"{plan},micro_batch=1", **given
        ).seconds

    base = seconds(A100)
    for changes in (
        {"flops": {"bf16": 624e12}},
        {"memory_bytes_per_s": 4e12},
        {"inside": A100.inside._replace(bytes_per_s=600e9)},
        {"overlap": True},
    ):
        assert seconds(msgspec.structs.replace(A100, **changes)) <= base
    assert seconds(A100, compute="f32") > base


@each("zero, shared", [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_both_ends_of_a_pipeline_sum_the_gradients_of_a_shared_table(zero: int, shared: int) -> None:
    """By hand: f32 gradients of 50257 x 1024 on two hosts' ports; a ring of two moves them once."""
    numbers = {"layers": 24, "hidden": 1024, "heads": 16, "vocab": 50257, "sequence": 1024}
    hosts_of_one = msgspec.structs.replace(A100, ranks=1)
    plan = f"data=2,pipeline=2,zero={zero},micro_batch=1"
    tied, untied = (
        un.plan(shape_of("gpt", **numbers, tied=tied), batch=16, gpus=4, hardware=hosts_of_one, plan=plan)
        for tied in (True, False)
    )
    (table,) = [
        each for each in tied.collectives if (each.collective, each.axis) == ("all_reduce", "pipeline")
    ]
    nbytes = 50257 * 1024 * 4 / shared
    assert (table.ranks, table.nbytes, table.calls) == (2, nbytes, 1)
    between = A100.between
    expected = nbytes / (between.bytes_per_s * A100.efficiency.links) + 2 * between.latency_s
    assert table.seconds == table.exposed == pytest.approx(expected, rel=1e-9)
    assert tied.chosen.time.messages - untied.chosen.time.messages == pytest.approx(expected, rel=1e-9)
    assert not [each for each in untied.collectives if each.axis == "pipeline" and each.collective != "send"]


def test_equal_calls_are_one_entry() -> None:
    """Under ZeRO 3 each micro-batch gathers the parameters twice, forward and backward."""
    shape = shape_of("gpt", layers=24, hidden=1024, heads=16, vocab=50257, sequence=1024)
    choice = un.plan(shape, batch=16, gpus=4, hardware=A100, plan="data=4,zero=3,micro_batch=1")
    calls = {each.collective: each.calls for each in choice.collectives}
    assert calls == {"all_gather": 2 * 4 * 24, "reduce_scatter": 4 * 24}
    assert len(choice.collectives) == 2
    assert sum(each.exposed for each in choice.collectives) == pytest.approx(choice.chosen.time.data)
