"""How rows of experts travel: to each expert, once to each host, beside compute. Products in 8 bits."""

from __future__ import annotations

import numpy as np
import pytest

import unisono as un
from inside_planner import layer_activations, places_hit, read_shape
from loops import each
from unisono.planner import PlanChoice, TrainingPlan

PLAN = "expert=64,pipeline=4,interleave=8,zero=2,recompute=full,micro_batch=1"


def deepseek(**given: object) -> PlanChoice:
    """A step of DeepSeek-V3 on 256 H100, experts over eight hosts."""
    shape = read_shape("deepseek-v3", 4096)
    return un.plan(shape, batch=512, gpus=256, hardware="h100-80g", plan=PLAN, **given)


@each("places, each_, count", [(8, 32, 8), (64, 4, 8), (4, 32, 8), (8, 16, 8), (4, 1, 4), (2, 4, 1)])
def test_places_are_those_of_chance(places: int, each_: int, count: int) -> None:
    draws = np.random.default_rng(1).random((4000, places * each_)).argsort(axis=1)[:, :count]
    hit = np.mean([len(set(row)) for row in (draws // each_).tolist()])
    assert places_hit(places, each_, count) == pytest.approx(hit, rel=0.02)


def test_a_row_goes_once_to_a_host() -> None:
    """DeepSeek-V3 keeps a token on four hosts of eight; fewer hosts are fewer bytes."""
    found = [deepseek(), *(deepseek(dispatch="hosts", routed_hosts=most) for most in (0, 4, 1))]
    experts = [choice.chosen.time.experts for choice in found]
    assert experts == sorted(experts, reverse=True)
    # Seven of eight copies leave the host, and 7/8 of the one copy.
    assert experts[0] / experts[3] == pytest.approx(8, rel=0.05)
    for choice in found:
        exchange = next(one for one in choice.collectives if one.axis == "expert")
        assert exchange.exposed == pytest.approx(exchange.seconds)


def test_rows_travel_beside_another_micro_batch() -> None:
    plain, beside = deepseek(), deepseek(expert_overlap=True)
    assert beside.chosen.time.experts < 0.5 * plain.chosen.time.experts
    assert beside.seconds < plain.seconds
    assert beside.memory_bytes > plain.memory_bytes
    exchange = next(one for one in beside.collectives if one.axis == "expert")
    assert exchange.exposed < exchange.seconds
    alone = "expert=8,zero=1,micro_batch=1"
    shape = read_shape("mixtral-8x7b", 4096)
    given = {"batch": 8, "gpus": 8, "hardware": "h100-80g", "plan": alone}
    assert un.plan(shape, **given, expert_overlap=True).seconds == un.plan(shape, **given).seconds


def test_eight_bits_are_quicker_and_smaller_in_part() -> None:
    """Attention and the output matrix are not quicker; weights have two more bytes, inputs one fewer."""
    shape = read_shape("llama3-8b", 8192)
    given = {"batch": 8, "gpus": 8, "hardware": "h100-80g", "plan": "zero=1,micro_batch=1"}
    wide, narrow = (un.plan(shape, compute=compute, **given) for compute in ("bf16", "fp8"))
    assert 0.5 < narrow.chosen.time.matrix / wide.chosen.time.matrix < 0.7
    assert narrow.chosen.time.other > wide.chosen.time.other
    assert narrow.chosen.memory.parameters == wide.chosen.memory.parameters
    more = narrow.chosen.memory.buffers - wide.chosen.memory.buffers
    layers = shape.layers * (shape.matrices() + shape.vectors())
    assert more == pytest.approx(2 * layers)
    tokens, plan = 8192, TrainingPlan()
    saved = layer_activations(shape, plan, 2) - layer_activations(shape, plan, 2, inputs=1)
    assert saved == tokens * (2 * shape.hidden + shape.mlp)
