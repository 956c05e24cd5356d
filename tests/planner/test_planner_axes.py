"""Context, experts, hybrid sharding, schedules, uneven stages, swapping and codecs, each by hand."""

from __future__ import annotations

import msgspec
import pytest

import unisono as un
from inside_planner import (
    PlanChoice,
    PlanModel,
    PricedCollective,
    RankLayout,
    collective_s,
    interconnect_of,
    layer_activations,
    layers_of_rank,
    stage_layers,
)
from loops import each
from unisono import networks
from unisono.networks import Cable, Costs, Network
from unisono.planner import ExpertShape, LatentShape, TrainingPlan, find_hardware, shape_of

A100 = find_hardware("a100-80g")
COSTS = Costs(o_send_s=1e-6, o_recv_s=1e-6)
PORT, INNER = Cable(1e-6, 25e9), Cable(1e-6, 300e9)
ONE_HOST = networks.star(1, ranks=8, cable=PORT, inner=INNER, inside="switch", nics=8, costs=COSTS)
ONE_RANK_EACH = networks.star(8, ranks=1, cable=PORT, costs=COSTS)
RAILS = networks.star(2, ranks=8, cable=PORT, inner=INNER, inside="switch", nics=8, costs=COSTS)

LLAMA = {
    "layers": 8,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 8,
    "ffn": 4096,
    "vocab": 32000,
    "sequence": 4096,
}
DENSE = shape_of("llama", **LLAMA)
EXPERTS = ExpertShape(count=8, top_k=2, ffn=2048, shared_ffn=1024, dense_layers=1)
MIXED = shape_of("llama", **LLAMA, experts=EXPERTS)


def priced(text: str, shape: un.planner.TransformerShape = DENSE, **given: object) -> PlanChoice:
    job = {"batch": 64, "gpus": 8, "hardware": A100, **given}
    return un.plan(shape, **job, plan=text)


def call(choice: PlanChoice, collective: str, axis: str) -> PricedCollective:
    (found,) = [one for one in choice.collectives if (one.collective, one.axis) == (collective, axis)]
    return found


@each("network", [ONE_HOST, ONE_RANK_EACH, RAILS])
@each("nbytes", [16e6, 512e6])
def test_an_all_to_all_is_the_simulators(network: Network, nbytes: float) -> None:
    links = interconnect_of(A100, network, network.size)
    layout = RankLayout.of(network.size, 1, links.ranks, network.size)
    found = collective_s("all_to_all", layout, nbytes, links, 1.0)
    simulated = min(
        un.simulate("all_to_all", network, algorithm=name, nbytes=nbytes, segment_bytes=int(nbytes)).seconds
        for name in ("direct", "pairwise")
    )
    assert 0.6 <= found / simulated <= 1.05


# ---- context -----------------------------------------------------------------------------------------------


@each("name", ["llama", "gpt"])
@each("context", [2, 4, 8])
def test_ranks_of_a_context_axis_share_activations_and_work(name: str, context: int) -> None:
    shape = shape_of(name, **LLAMA)
    one, cut = TrainingPlan(), TrainingPlan(context=context)
    assert layer_activations(shape, cut, 2) * context == layer_activations(shape, one, 2)
    whole = priced("data=8,micro_batch=1", shape)
    parts = priced(f"data={8 // context},context={context},micro_batch={context}", shape)
    # As many tokens of a micro-batch on each rank; attention has more kernels.
    assert parts.chosen.time.matrix == pytest.approx(whole.chosen.time.matrix, rel=0.1)
    assert parts.chosen.memory.activations == pytest.approx(whole.chosen.memory.activations)


def test_a_ring_sends_keys_there_and_back_and_their_gradients() -> None:
    """7 heads of keys are not for 8 ranks; f32 gradients make c hops, keys c-1 in each pass."""
    shape = shape_of("llama", **{**LLAMA, "heads": 14, "kv_heads": 7, "hidden": 896})
    choice = priced("context=8,micro_batch=1", shape)
    ring = call(choice, "send", "context")
    assert ring.nbytes == 2 * (4096 / 8) * (7 * 64) * 2  # keys and values, bf16
    assert ring.calls == 64 * 8 * (7 + 7 + 8)
    slow = priced("context=8,micro_batch=1", shape, hardware=msgspec.structs.replace(A100, ranks=1))
    assert slow.chosen.time.context > choice.chosen.time.context > 0


def test_heads_are_exchanged_where_that_is_cheaper() -> None:
    choice = priced("context=8,micro_batch=1")
    exchange = call(choice, "all_to_all", "context")
    q_and_out, keys = 2 * 512 * 1024, 2 * 512 * 512
    assert exchange.nbytes * 4 == 2 * (q_and_out + keys)
    assert exchange.calls == 64 * 8 * 8
    assert exchange.exposed == exchange.seconds == pytest.approx(choice.chosen.time.context)


def test_a_long_sequence_needs_a_context_axis() -> None:
    shape = shape_of("llama", **{**LLAMA, "sequence": 1 << 20})
    choice = un.plan(shape, batch=1, gpus=8, hardware=A100)
    assert choice.plan.context == 8 or choice.plan.tensor > 1
    with pytest.raises(un.planner.NoPlanFitsError):
        un.plan(shape, batch=8, gpus=8, hardware=A100, fix="context=1,tensor=1")


# ---- experts -----------------------------------------------------------------------------------------------


@each("expert", [1, 2, 4, 8])
def test_all_experts_are_on_some_rank(expert: int) -> None:
    choice = priced(f"data=8,expert={expert},micro_batch=1", MIXED)
    spread = 7 * MIXED.expert_elements()
    assert choice.chosen.memory.parameters == 2 * (MIXED.parameters - spread + spread / expert)


def test_rows_go_to_their_experts_and_back() -> None:
    choice = priced("data=8,expert=8,micro_batch=1", MIXED)
    rows = call(choice, "all_to_all", "expert")
    assert rows.nbytes == 4096 * 2 * 1024 * 2  # tokens, two experts, hidden, bf16
    assert rows.calls == 8 * 7 * 4  # micro-batches, layers, two there and two back
    assert rows.seconds == rows.exposed == pytest.approx(choice.chosen.time.experts)
    again = priced("data=8,expert=8,micro_batch=1,recompute=full", MIXED)
    assert call(again, "all_to_all", "expert").calls == 8 * 7 * 6
    assert not [one for one in priced("data=8", MIXED).collectives if one.axis == "expert"]


def test_uneven_rows_cost_time_and_memory() -> None:
    even, uneven = (priced("data=8,expert=8,micro_batch=1", MIXED, imbalance=by) for by in (1.0, 1.5))
    assert uneven.chosen.time.experts == pytest.approx(1.5 * even.chosen.time.experts, rel=0.02)
    assert uneven.chosen.time.matrix > even.chosen.time.matrix
    assert uneven.memory_bytes > even.memory_bytes
    alone = [priced("data=8,micro_batch=1", MIXED, imbalance=by).seconds for by in (1.0, 1.5)]
    assert alone[0] == alone[1]  # each rank has all experts


def test_copies_of_experts_exchange_their_own_gradients() -> None:
    choice = priced("data=8,expert=4,micro_batch=1", MIXED)
    calls = [one for one in choice.collectives if one.axis == "data"]
    assert {one.ranks for one in calls} == {8, 2}
    found = {one.ranks: one.nbytes * one.calls for one in calls}
    assert found[2] == pytest.approx(4 * 7 * MIXED.expert_elements() / 4)
    assert found[8] == pytest.approx(4 * (MIXED.parameters - 7 * MIXED.expert_elements()))
    assert {one.ranks for one in priced("data=8,expert=8", MIXED).collectives if one.axis == "data"} == {8}


@each("plan", [{}, {"pipeline": 2}, {"pipeline": 4}, {"pipeline": 4, "interleave": 2}, {"pipeline": 8}])
def test_dense_layers_are_the_first_ones(plan: dict[str, int]) -> None:
    of = TrainingPlan(**plan)
    first, middle, last = (layers_of_rank(MIXED, of, rank) for rank in (0, 1, of.pipeline - 1))
    assert first.dense == 1
    assert [rank.total for rank in (first, last)] == [
        stage_layers(8, of).first, stage_layers(8, of).last,
    ]  # fmt: skip
    if of.pipeline > 1:
        assert last.dense == 0
    if of.pipeline > 2:
        assert middle.dense == 0


def test_latent_attention_has_the_widths_of_its_heads() -> None:
    """DeepSeek-V2's numbers by hand: queries and keys of 24, values of 12, four heads."""
    latent = LatentShape(query_rank=20, key_rank=16, rotary=8, value=12)
    numbers = {"layers": 1, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 100, "sequence": 32}
    shape = shape_of("llama", **numbers, head_size=24, latent=latent)
    attention = 64 * 20 + 20 * 4 * 24 + 64 * (16 + 8) + 16 * 4 * (16 + 12) + 4 * 12 * 64
    assert shape.matrices() == attention + 3 * 64 * 128
    assert shape.vectors() == 2 * 64 + 20 + 16
    assert shape.core_flops(10) == 2 * 10 * 32 * 4 * (24 + 12)
    with pytest.raises(ValueError, match="as many key heads as heads"):
        shape_of("llama", **numbers, head_size=24, kv_heads=2, latent=latent)


@each(
    "wrong", [{"count": 0}, {"top_k": 9}, {"top_k": 0}, {"ffn": 0}, {"shared_ffn": -1}, {"dense_layers": 9}]
)
def test_wrong_experts_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        shape_of("llama", **LLAMA, experts=ExpertShape(**{"count": 8, "top_k": 2, "ffn": 64, **wrong}))


# ---- sharing -----------------------------------------------------------------------------------------------


@each("zero, rounds", [(1, 1), (2, 4), (3, 4)])
def test_replicas_sum_their_shares_once(zero: int, rounds: int) -> None:
    """32 ranks on hosts of 8: shards within a host, four replicas."""
    slow = msgspec.structs.replace(A100, between=A100.between._replace(bytes_per_s=2.5e9))
    given = {"batch": 128, "gpus": 32, "hardware": slow}
    choice = priced(f"data=32,shard=8,zero={zero},micro_batch=1", **given)
    replica, scatter = call(choice, "all_reduce", "replica"), call(choice, "reduce_scatter", "data")
    assert (replica.ranks, scatter.ranks) == (4, 8)
    assert replica.nbytes * replica.calls == pytest.approx(4 * DENSE.parameters / 8)
    assert scatter.nbytes * scatter.calls == pytest.approx(rounds * 4 * DENSE.parameters)
    all_of_them = priced(f"data=32,zero={zero},micro_batch=1", **given)
    assert choice.chosen.memory.moments == pytest.approx(4 * all_of_them.chosen.memory.moments)
    if zero == 3:  # parameters are gathered within the host, eight times a step
        assert choice.chosen.time.data < all_of_them.chosen.time.data


def test_swapping_moments_takes_their_bytes_over_the_link() -> None:
    assert A100.host is not None
    plain, swapped = (priced(f"data=8,zero=1,micro_batch=1,swap={what}") for what in ("none", "moments"))
    assert swapped.chosen.memory.moments == 0
    moments = plain.chosen.memory.moments
    seconds = moments / (A100.host.bytes_per_s * A100.efficiency.links)
    assert swapped.chosen.time.swap == pytest.approx(seconds - plain.chosen.time.update)
    assert swapped.memory_bytes < plain.memory_bytes


def test_swapping_states_leaves_two_units() -> None:
    plain, swapped = (priced(f"data=8,micro_batch=1,swap={what}") for what in ("none", "states"))
    states = plain.chosen.memory[:3]
    assert swapped.chosen.memory[:3] == (0, 0, 0)
    table = DENSE.table()
    layer = DENSE.matrices() + DENSE.vectors()
    assert swapped.chosen.memory.buffers == (layer + max(layer, table)) * (2 + 4 + 12)
    (part,) = PlanModel(plain.job).parts(swapped.plan)
    assert part.model.memory.host_bytes(swapped.plan, part.memory.elements) == pytest.approx(sum(states))
    assert swapped.chosen.time.swap > 0


def test_a_host_without_the_memory_holds_nothing() -> None:
    assert A100.host is not None
    small = msgspec.structs.replace(A100, host=A100.host._replace(nbytes=1 << 20))
    assert not priced("data=8,micro_batch=1,swap=states", hardware=small).fits
    none = msgspec.structs.replace(A100, host=None)
    with pytest.raises(ValueError, match=r"has no \[host\]"):
        priced("data=8,swap=states", hardware=none)


@each("codec, width", [("bf16", 2), ("int8", 1 + 1 / 16)])
def test_codecs_send_fewer_bytes(codec: str, width: float) -> None:
    choice = priced(f"data=8,micro_batch=1,codec={codec}")
    summed = call(choice, "all_reduce", "data")
    assert summed.nbytes * summed.calls == pytest.approx(width * DENSE.parameters)
    assert choice.chosen.time.codec > 0


def test_low_rank_under_zero_sends_whole_factors_and_under_shards_those_of_rows() -> None:
    def width(rows: int, matrices: list[tuple[int, int]]) -> float:
        return sum(8 * (n / rows + k) for n, k in matrices) / sum(n / rows * k for n, k in matrices)

    matrices = DENSE.layer_matrices()
    for zero in (1, 2, 3):
        choice = priced(f"data=8,micro_batch=1,zero={zero},codec=rank4")
        summed = call(choice, "all_reduce", "data")
        assert summed.nbytes * summed.calls == pytest.approx(width(1, matrices) * DENSE.parameters)
        assert {each.collective for each in choice.collectives} == {"all_reduce", "all_gather"}
        plain = priced(f"data=8,micro_batch=1,zero={zero}")
        more = choice.chosen.memory.buffers - plain.chosen.memory.buffers
        kept = 4 if zero == 1 else 8  # errors of whole matrices; gradients whole until the last micro-batch
        assert more == pytest.approx(kept * DENSE.parameters)
    cut = priced("data=8,micro_batch=1,zero=3,shard=4,codec=rank4")
    met = call(cut, "all_reduce", "replica")
    assert met.nbytes * met.calls == pytest.approx(width(4, matrices) * DENSE.parameters / 4)
    whole = call(cut, "reduce_scatter", "data")
    assert whole.nbytes * whole.calls == pytest.approx(4 * DENSE.parameters)


def test_codecs_are_taken_only_if_asked_for() -> None:
    slow = msgspec.structs.replace(A100, ranks=1, between=A100.between._replace(bytes_per_s=1e8))
    given = {"batch": 8, "gpus": 8, "hardware": slow, "fix": "zero=0,tensor=1,pipeline=1,context=1"}
    plain = un.plan(DENSE, **given)
    lossy = un.plan(DENSE, **given, codecs=("bf16", "rank4"))
    assert plain.plan.codec == "none"
    assert lossy.plan.codec == "rank4"
    assert lossy.seconds < plain.seconds


# ---- stages ------------------------------------------------------------------------------------------------


def test_the_last_rank_gets_fewer_layers_where_the_output_matrix_is_large() -> None:
    shape = shape_of("llama", **{**LLAMA, "layers": 24, "vocab": 256000})
    fix = "tensor=1,context=1,pipeline=4,data=2,interleave=1,schedule=1f1b"
    uneven = un.plan(shape, batch=64, gpus=8, hardware=A100, fix=fix)
    even = un.plan(shape, batch=64, gpus=8, hardware=A100, fix=f"{fix},tail=0")
    assert uneven.plan.tail > 0
    assert uneven.seconds < even.seconds
    layers = stage_layers(24, uneven.plan)
    assert layers.last == layers.middle - uneven.plan.tail
    assert layers.first + 2 * layers.middle + layers.last >= 24


def test_zb_h1_fills_the_bubble() -> None:
    one, other = (priced(f"data=2,pipeline=4,micro_batch=4,schedule={name}") for name in ("1f1b", "zb-h1"))
    assert other.chosen.time.bubble < one.chosen.time.bubble
    assert other.chosen.memory.activations >= one.chosen.memory.activations
    assert PlanModel(one.job).least_s(other.plan) <= other.seconds
