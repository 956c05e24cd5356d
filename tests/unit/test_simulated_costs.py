"""What a rank itself takes: calls, caches, messages within a host, shared cores."""

from __future__ import annotations

from typing import Any

import pytest

import unisono as un
from unisono import networks
from unisono.networks import Cable, Costs, Network
from unisono.simulation import Call, Program, simulate_program

CABLE = Cable(2e-6, 1e9)


def star(ranks: int, **given: Any) -> Network:
    return networks.star(ranks, cable=CABLE, costs=Costs(), **given)


def test_a_call_takes_time_before_its_first_step() -> None:
    network = networks.star(2, cable=CABLE, costs=Costs(call_s=1e-3))
    plain = un.simulate("barrier", star(2), algorithm="dissemination", nbytes=0).seconds
    assert un.simulate("barrier", network, algorithm="dissemination", nbytes=0).seconds == plain + 1e-3
    twice = [Call("barrier", "dissemination", 0.0)] * 2
    assert simulate_program(Program([twice]), network).seconds == pytest.approx(2 * plain + 2e-3)


def test_buffers_beyond_the_cache_cost_more_per_byte() -> None:
    given: dict[str, Any] = {"o_s_per_byte": 1e-9, "cache_bytes": 1000, "beyond_cache": 3.0}
    network = networks.star(2, cable=Cable(0.0, 1e15), costs=Costs(**given))
    small, large = (
        un.simulate("broadcast", network, algorithm="direct", nbytes=nbytes).seconds
        for nbytes in (1000, 2000)
    )
    assert (small, large) == pytest.approx((2e-6, 12e-6))


def test_bytes_for_ranks_of_a_host_are_written_once() -> None:
    """Rank 0 writes once for two others, each copies; a rank of another host costs as much as before."""
    inside = networks.InsideCosts(send_s=1.0, recv_s=10.0, write_s_per_byte=0.5, s_per_byte=0.25)
    costs = Costs(o_send_s=100.0, o_recv_s=1000.0, o_s_per_byte=5.0, inside=inside)
    network = networks.star(2, ranks=3, cable=Cable(0.0, 1e15), inner=Cable(0.0, 1e15), costs=costs)
    host = un.simulate("broadcast", network.first(3), algorithm="direct", nbytes=2)
    assert host.ends == pytest.approx([3.0, 2.0 + 10.5, 3.0 + 10.5])
    both = un.simulate("broadcast", network.first(4), algorithm="direct", nbytes=2)
    assert both.ends[0] == pytest.approx(3.0 + 110.0)
    assert both.ends[3] == pytest.approx(113.0 + 1010.0)
    gathered = un.simulate("reduce", network.first(3), algorithm="direct", nbytes=2)
    assert gathered.seconds == pytest.approx(2.0 + 20.0)  # a reduction reads the bytes where they are


def test_large_messages_within_a_host_are_copied_once() -> None:
    """From 4 bytes on the sender writes nothing; a reduction copies before it adds."""
    inside = networks.InsideCosts(write_s_per_byte=1.0, s_per_byte=1.0, in_place_bytes=4)
    costs = Costs(inside=inside, reduce_s_per_byte=0.5)
    network = networks.star(1, ranks=2, inner=Cable(0.0, 1e15), costs=costs)
    small, large = (
        un.simulate("broadcast", network, algorithm="direct", nbytes=nbytes).ends for nbytes in (2, 4)
    )
    assert small == pytest.approx([2.0, 4.0])
    assert large == pytest.approx([0.0, 4.0])
    assert un.simulate("reduce", network, algorithm="direct", nbytes=4).seconds == pytest.approx(4.0 + 2.0)


@pytest.mark.parametrize("folds", [True, False])
def test_ranks_share_the_cores_of_their_host(folds: bool) -> None:
    """Four ranks on two cores: work takes twice as long, whether one rank stands for all or not."""
    costs = Costs(o_s_per_byte=1e-9, reduce_s_per_byte=1e-9)
    given: dict[str, Any] = {"ranks": 4, "cable": Cable(0.0, 1e15), "inner": Cable(0.0, 1e15), "costs": costs}
    few, enough = networks.star(2, cores=2, **given), networks.star(2, cores=4, **given)
    slow, fast = (
        un.simulate(
            "all_reduce", network, algorithm="two_shot", nbytes=8e6, fold=folds, segment_bytes=1 << 30
        )
        for network in (few, enough)
    )
    assert slow.seconds == pytest.approx(2 * fast.seconds, rel=1e-6)
