"""What a rank itself takes: calls, caches, messages within a host, shared cores."""

from typing import Any

import pytest

import unisono as un
from unisono import networks
from unisono.networks import ByteCosts, Cable, Costs, Network
from unisono.plans import ALGORITHMS
from unisono.plans.catalog import steps_of
from unisono.plans.lowering import lower_rank
from unisono.simulation import Call, Compute, Program, simulate_program
from unisono.simulation.segments import parts_of

CABLE = Cable(2e-6, 1e9)


def star(ranks: int, **given: Any) -> Network:
    return networks.star(ranks, cable=CABLE, costs=Costs(), **given)


def test_a_call_takes_time_before_its_first_step() -> None:
    network = networks.star(2, cable=CABLE, costs=Costs(call_s=1e-3))
    plain = un.simulate("barrier", star(2), algorithm="dissemination", nbytes=0).seconds
    assert un.simulate("barrier", network, algorithm="dissemination", nbytes=0).seconds == plain + 1e-3
    twice = [Call("barrier", "dissemination", 0.0)] * 2
    assert simulate_program(Program([twice]), network).seconds == pytest.approx(2 * plain + 2e-3)


def test_bytes_of_larger_buffers_have_costs_of_their_own() -> None:
    larger = (ByteCosts(beyond_bytes=1000, send=3e-9), ByteCosts(beyond_bytes=4000, reduce=2e-9))
    costs = Costs(o_s_per_byte=1e-9, reduce_s_per_byte=1e-9, larger=larger)
    network = networks.star(2, cable=Cable(0.0, 1e15), costs=costs)
    found = [
        un.simulate("reduce", network, algorithm="direct", nbytes=nbytes).seconds
        for nbytes in (1000, 2000, 5000)
    ]
    assert found == pytest.approx([3e-6, 14e-6, 5 * 8e-6])


def test_a_rank_that_had_to_wait_wakes_up() -> None:
    """Rank 1 waits for rank 0. Rank 2 comes late, and its message is there."""
    network = networks.star(3, cable=Cable(1.0, 1e15), costs=Costs(wake_s=10.0))
    late = un.simulate("broadcast", network, algorithm="direct", nbytes=1, delay={2: 5.0})
    assert late.ends == pytest.approx([0.0, 12.0, 5.0])


def test_a_link_with_a_burst_passes_it_at_once_after_a_pause() -> None:
    """100 bytes a second, a burst of 300: a message of 500 takes 2 s, one right after it all of its 5 s."""
    network = networks.star(2, cable=Cable(0.0, 100.0, burst_bytes=300.0), costs=Costs())
    call = Call("broadcast", "direct", 500.0)
    one = un.simulate("broadcast", network, algorithm="direct", nbytes=500)
    assert one.seconds == pytest.approx(2.0)
    assert {use.nbytes for use in one.links} == {500.0}
    assert simulate_program(Program([[call] * 2]), network).seconds == pytest.approx(7.0)
    paused = Program([[call, Compute(3.0), call]])  # a pause from 2 s to 3 s saves 100 bytes
    assert simulate_program(paused, network).seconds == pytest.approx(3.0 + 4.0)


@pytest.mark.parametrize("algorithm", ["ring", "two_shot", "doubling"])
def test_bursts_are_shared_alike_by_all_ranks_that_one_stands_for(algorithm: str) -> None:
    network = networks.star(4, ranks=2, cable=Cable(1e-6, 1e8, burst_bytes=1e5), costs=Costs())
    folds, all_ = (
        un.simulate("all_reduce", network, algorithm=algorithm, nbytes=3e6, fold=fold)
        for fold in (True, False)
    )
    assert folds.simulated < all_.simulated
    assert folds.ends == all_.ends
    plain = networks.star(4, ranks=2, cable=Cable(1e-6, 1e8), costs=Costs())
    assert all_.seconds < un.simulate("all_reduce", plain, algorithm=algorithm, nbytes=3e6).seconds


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


def shared(ranks: int, cores: int = 0, **given: Any) -> Network:
    """One host: a byte takes a second to write, two to copy, three to copy in place, half of one to add."""
    inside = networks.InsideCosts(
        write_s_per_byte=1.0, s_per_byte=2.0, in_place_bytes=4, in_place_s_per_byte=3.0, **given
    )
    costs = Costs(inside=inside, reduce_s_per_byte=0.5, copy_s_per_byte=0.25)
    return networks.star(1, ranks=ranks, cores=cores, inner=Cable(0.0, 1e15), costs=costs)


def ends(collective: str, network: Network, nbytes: float, algorithm: str = "direct") -> list[float]:
    return un.simulate(collective, network, algorithm=algorithm, nbytes=nbytes, segment_bytes=1 << 20).ends


def test_messages_in_place_are_copied_once_by_both_ends() -> None:
    """A rank that only sends does so from 4 bytes on. It helps when it waits, and ends with the last."""
    assert ends("broadcast", shared(2), 2) == pytest.approx([2.0, 2.0 + 4.0])
    assert ends("broadcast", shared(2), 4) == pytest.approx([6.0, 6.0])  # 12 s of work
    assert ends("scatter", shared(2), 8) == pytest.approx([6.5, 6.5])  # the root copies its own for a second


def test_a_rank_that_receives_sends_in_place_from_twice_the_size_on() -> None:
    """Nobody helps a rank that works as long as itself."""
    assert ends("all_to_all", shared(2), 14) == pytest.approx([1.75 + 7 + 14] * 2)
    assert ends("all_to_all", shared(2), 16) == pytest.approx([2.0 + 24] * 2)


def test_what_is_reduced_or_changes_later_is_not_sent_in_place() -> None:
    """A reduction reads what was written. One whose result goes elsewhere costs a copy, too."""
    assert ends("reduce", shared(2), 8) == pytest.approx([8.0 + 4.0, 8.0])
    assert ends("reduce_scatter", shared(2), 16) == pytest.approx([8.0 + 4.0 + 2.0] * 2)


def test_with_fewer_cores_than_ranks_messages_are_written() -> None:
    """Four ranks on two cores. Chunks of a mebibyte may run ahead: then they are not."""
    small, large = 1 << 16, 1 << 20
    busy = [
        un.simulate("scatter", shared(4, cores=2), algorithm="direct", nbytes=4 * chunk).busy
        for chunk in (small, large)
    ]
    assert busy[0] == pytest.approx([3.25 * small, *[2.0 * small] * 3])
    assert busy[1][0] == pytest.approx(0.25 * large)  # its receivers keep both cores busy
    assert busy[1][1:] == pytest.approx([3.0 * large] * 3)


def test_more_than_64_ranks_are_not_analysed() -> None:
    assert ends("broadcast", shared(65), 4)[0] == pytest.approx(4.0)


def segments(network: Network, collective: str, nbytes: int, algorithm: str = "direct") -> int:
    """Messages, by those of one segment."""
    whole = un.simulate(collective, network, algorithm=algorithm, nbytes=nbytes, segment_bytes=1 << 30)
    found = un.simulate(collective, network, algorithm=algorithm, nbytes=nbytes)
    return found.messages // whole.messages


def test_segments_are_those_of_the_engine() -> None:
    """csrc/engine/executor.cpp: 256 KiB on a host, 4 MiB where nothing is written, 2 MiB between hosts; what
    is written takes half of the staging memory, divided by one more than there are chunks.
    """
    mib = 1 << 20
    host, crowded = shared(2), shared(4, cores=2)
    assert segments(host, "reduce", mib) == 4
    assert segments(host, "broadcast", 8 * mib) == 2
    assert segments(crowded, "broadcast", 8 * mib) == 32
    assert segments(crowded, "broadcast", 8 * mib, "binomial") == 2  # messages of one receiver run ahead
    assert segments(crowded, "broadcast", mib // 2, "binomial") == 2
    assert segments(star(2), "broadcast", 8 * mib) == 4
    pairs = networks.star(2, ranks=2, cable=CABLE, costs=Costs())
    assert segments(pairs, "broadcast", mib) == 4  # 512 KiB / 2
    assert segments(pairs, "all_gather", 4 * mib) == 11  # a mebibyte, 512 KiB / 5 in whole pages at a time


@pytest.mark.parametrize("folds", [True, False])
def test_hosts_share_the_cores_of_their_machine(folds: bool) -> None:
    """Four hosts of one rank on a machine of two cores: overheads take twice as long."""
    costs = Costs(o_s_per_byte=1e-9)
    slow, fast = (
        un.simulate(
            "all_gather",
            networks.star(4, cable=Cable(0.0, 1e15), costs=costs, shared_cores=cores),
            algorithm="ring",
            nbytes=4e6,
            fold=folds,
        )
        for cores in (2, 4)
    )
    assert slow.seconds == pytest.approx(2 * fast.seconds, rel=1e-6)
    with pytest.raises(ValueError, match="shared_cores"):
        networks.star(2, shared_cores=-1)


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


@pytest.mark.parametrize("cores", [2, 4])
def test_one_rank_stands_for_all_also_where_messages_are_sent_in_place(cores: int) -> None:
    network = shared(4, cores=cores, send_s=1e-3)
    folded = 0
    for collective, names in ALGORITHMS.items():
        for algorithm in names:
            one, all_ = (
                un.simulate(collective, network, algorithm=algorithm, nbytes=6 << 20, fold=fold)
                for fold in (None, False)
            )
            assert one.ends == all_.ends, (collective, algorithm)
            folded += one.simulated < all_.simulated
    assert folded > 10


def test_chunks_are_counted_as_the_engine_counts_them() -> None:
    """The engine's limit of a message depends on `in_flight`, which every program carries."""
    hosts = (0, 0, 1, 1)
    for collective, names in ALGORITHMS.items():
        for algorithm in names:
            steps = steps_of(collective, algorithm, 4, hosts)
            header = lower_rank(0, collective, algorithm, 4, hosts=hosts)[:7]
            assert max(1, header[5]) == parts_of(collective, lambda rank, of=steps: of(rank, 4, 0), 4)
