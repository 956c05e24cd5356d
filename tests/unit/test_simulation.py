"""`simulate`: symmetry, conditions, the cost formulas, programs, switches that add, errors."""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono as un
from effort import LONG
from unisono import networks
from unisono.engine.costs import plan_cost
from unisono.networks import Cable, Costs, Network
from unisono.plans import ALGORITHMS, Out, Plan, Recv, Reduce, Send, make
from unisono.plans.plan import Step

CABLE = Cable(2e-6, 1e9)
FREE = Costs()
COSTS = Costs(o_send_s=3e-7, o_recv_s=2e-7, o_s_per_byte=1e-12, g_s=4e-7, reduce_s_per_byte=1e-10)
NAMES = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective]]

NETWORKS = {
    "star": lambda: networks.star(4, ranks=4, costs=COSTS),
    "ring": lambda: networks.ring(6, ranks=2),
    "torus": lambda: networks.torus(3, 4),
    "fat_tree": lambda: networks.fat_tree(4, oversubscription=2, ranks=2),
    "dragonfly": lambda: networks.dragonfly(2, 2, 2),
    "rails": lambda: networks.rail_optimised(2, 2),
    "dgx": lambda: networks.dgx(2),
    "mesh": lambda: networks.full_mesh(4, ranks=2),
}


def star(ranks: int, **given: Any) -> Network:
    return networks.star(ranks, cable=CABLE, costs=FREE, **given)


# ---- symmetry ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_folded_and_unfolded_runs_are_equal_to_the_bit(name: str) -> None:
    network = NETWORKS[name]()
    folds = 0
    for collective, algorithm in NAMES:
        given: Any = {"algorithm": algorithm, "nbytes": 100_000, "segment_bytes": 1 << 16}
        one = un.simulate(collective, network, **given)
        all_ = un.simulate(collective, network, **given, fold=False)
        assert (one.seconds, one.messages) == (all_.seconds, all_.messages), (collective, algorithm)
        assert (one.ends, one.busy) == (all_.ends, all_.busy), (collective, algorithm)
        folds += one.simulated < all_.simulated
    assert folds > 4


@pytest.mark.parametrize("algorithm", ["ring", "torus", "hierarchical", "doubling"])
def test_the_same_for_1024_ranks(algorithm: str) -> None:
    network = networks.star(128, ranks=8, costs=COSTS)
    given: Any = {"algorithm": algorithm, "nbytes": 1 << 20, "segment_bytes": 1 << 20}
    if algorithm != "doubling" and not LONG:
        network = network.first(256)  # unfolded, 1,024 ranks take up to 10 s of a core
    one = un.simulate("all_reduce", network, **given)
    all_ = un.simulate("all_reduce", network, **given, fold=False)
    assert (one.seconds, one.messages, one.ends) == (all_.seconds, all_.messages, all_.ends)
    assert algorithm == "doubling" or one.simulated * 8 <= all_.simulated


def test_links_of_a_folded_run_carry_what_those_of_an_unfolded_one_do() -> None:
    network = networks.star(4, ranks=4)
    one = un.simulate("all_reduce", network, algorithm="hierarchical", nbytes=1e6)
    all_ = un.simulate("all_reduce", network, algorithm="hierarchical", nbytes=1e6, fold=False)
    unfolded = {use.link: use for use in all_.links}
    for use in one.links:
        other = unfolded[use.link]
        assert (use.busy_s, use.limiting_s, use.nbytes) == pytest.approx(
            (other.busy_s, other.limiting_s, other.nbytes)
        )


# ---- what the model says -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        ("all_reduce", "ring"),
        ("all_gather", "ring"),
        ("reduce_scatter", "ring"),
        ("all_reduce", "doubling"),
        ("all_reduce", "halving_doubling"),
        ("all_gather", "bruck"),
        ("all_to_all", "pairwise"),
        ("barrier", "dissemination"),
    ],
)
def test_where_every_rank_sends_one_message_at_a_time_the_published_formulas_hold(
    collective: str, algorithm: str
) -> None:
    nbytes = 0 if collective == "barrier" else 64_000
    found = un.simulate(collective, star(8), algorithm=algorithm, nbytes=nbytes, segment_bytes=1 << 30)
    formula = plan_cost.seconds(make(collective, algorithm, 8), nbytes, a=2 * CABLE.latency_s, b=1e-9)
    assert found.seconds == pytest.approx(formula, rel=1e-12)


def test_overheads_are_those_of_loggp() -> None:
    """Rank 0 sends two messages of 1,000 bytes: o + O s each, g apart; rank 1 receives both."""
    costs = Costs(o_send_s=1e-6, o_recv_s=2e-6, o_s_per_byte=1e-9, g_s=5e-6)
    network = networks.star(2, cable=Cable(1e-6, 1e9), costs=costs)

    def twice(rank: int, size: int, root: int) -> Iterator[Step]:
        for _ in range(2):
            yield Send(Out(0), to=(1,)) if rank == 0 else Recv(Out(0), frm=0)
            if rank == 0:
                yield Send(Out(0), to=())  # keeps the two apart

    found = un.simulate("broadcast", network, algorithm=twice, nbytes=1000)
    sent = 5e-6 + 1e-6 + 1e-6  # the second one: g after the first, o, O s
    assert found.ends == pytest.approx([sent, sent + 1e-6 + 2e-6 + 2e-6 + 1e-6])


def test_segments_overlap_along_a_chain() -> None:
    given: Any = {"algorithm": "hierarchical", "nbytes": 1 << 20}
    whole = un.simulate("broadcast", star(8), **given, segment_bytes=1 << 20)
    pieces = un.simulate("broadcast", star(8), **given, segment_bytes=1 << 16)
    assert pieces.seconds < 0.3 * whole.seconds


# ---- what simulators have been blamed for --------------------------------------------------------------


def test_the_topology_changes_the_result() -> None:
    seconds = {
        make_network.__name__: un.simulate(
            "all_to_all", make_network(16, cable=CABLE, costs=FREE), algorithm="pairwise", nbytes=1e6
        ).seconds
        for make_network in (networks.star, networks.ring, networks.full_mesh)
    }
    seconds["fat_tree"] = un.simulate(
        "all_to_all", networks.fat_tree(4, cable=CABLE, costs=FREE), algorithm="pairwise", nbytes=1e6
    ).seconds
    assert len(set(seconds.values())) == 4
    assert seconds["full_mesh"] < seconds["star"] < seconds["ring"]


def test_a_straggler_can_be_given() -> None:
    network = networks.star(8, cable=CABLE, costs=COSTS)
    given: Any = {"algorithm": "ring", "nbytes": 8e6}
    usual = un.simulate("all_reduce", network, **given)
    slow = un.simulate("all_reduce", network, **given, slow={3: 20.0})
    late = un.simulate("all_reduce", network, **given, delay={3: 1.0})
    assert slow.seconds > 1.2 * usual.seconds
    assert slow.busy[3] == pytest.approx(20 * slow.busy[2])
    assert late.seconds > 1.0
    assert late.limit.where == "rank 3"


def test_a_slow_link_can_be_given() -> None:
    network = star(8)
    given: Any = {"algorithm": "ring", "nbytes": 8e6}
    usual = un.simulate("all_reduce", network, **given)
    name = usual.links[0].name
    slow = un.simulate("all_reduce", network, **given, slow_links={name: 4.0})
    assert slow.seconds > 2 * usual.seconds
    assert slow.links[0].name == name == slow.limit.where


@pytest.mark.parametrize("algorithm", ["ring", "double_tree", "hierarchical"])
def test_32_and_64_ranks_differ(algorithm: str) -> None:
    seconds = [
        un.simulate("all_reduce", star(ranks), algorithm=algorithm, nbytes=1e6).seconds for ranks in (32, 64)
    ]
    assert seconds[0] < seconds[1]


def test_a_stuck_run_names_the_rank_the_step_and_the_link() -> None:
    network = star(4)
    lost = next(link.name for link in network.links if link.name.startswith("host2"))
    with pytest.raises(un.SimulationError, match=rf"rank 3, step 1, .* rank 2 sends .* link {lost}"):
        un.simulate("all_reduce", network, algorithm="ring", nbytes=8e6, lost_links=[lost])


def test_a_plan_that_deadlocks_names_the_rank_and_the_step() -> None:
    def deadlock(rank: int, size: int, root: int) -> Iterator[Step]:
        yield Send(Out(0), to=((rank + 1) % size,))
        yield Recv(Out(0), frm=(rank - 1) % size)
        yield Recv(Out(0), frm=(rank - 1) % size)

    with pytest.raises(un.SimulationError, match=r"rank 0, step 2, .* until rank 3 sends"):
        un.simulate("broadcast", star(4), algorithm=deadlock, nbytes=8)


# ---- switches that add ---------------------------------------------------------------------------------


def test_a_switch_that_adds_halves_the_bytes_of_a_ring() -> None:
    network = networks.star(16, cable=CABLE, costs=FREE, adds_bytes_per_s=0)
    ring = un.simulate("all_reduce", network, algorithm="ring", nbytes=64e6)
    switch = un.simulate("all_reduce", network, algorithm="in_network", nbytes=64e6)
    assert switch.seconds == pytest.approx(64e6 / 1e9 + (2 << 20) / 1e9, rel=0.05)  # up and down overlap
    assert switch.seconds < 0.6 * ring.seconds


def test_in_network_needs_a_switch_that_adds() -> None:
    with pytest.raises(ValueError, match="none of whose switches adds"):
        un.simulate("all_reduce", star(4), algorithm="in_network", nbytes=8)


# ---- results and arguments -----------------------------------------------------------------------------


def test_a_timeline_is_a_trace_for_perfetto(tmp_path: Path) -> None:
    network = networks.star(4, cable=CABLE, costs=COSTS)
    found = un.simulate("all_reduce", network, algorithm="ring", nbytes=8e6, timeline=1000, fold=False)
    found.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(found.seconds * 1e6)


def test_the_parts_of_the_longest_chain_add_up() -> None:
    network = networks.star(8, cable=CABLE, costs=COSTS)
    for algorithm in ALGORITHMS["all_reduce"]:
        found = un.simulate("all_reduce", network, algorithm=algorithm, nbytes=1e6)
        assert sum(found.breakdown) == pytest.approx(found.seconds)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"nbytes": -1}, "nbytes"),
        ({"nbytes": float("nan")}, "nbytes"),
        ({"size": 5}, "size"),
        ({"root": 4}, "root"),
        ({"segment_bytes": 0}, "segment_bytes"),
        ({"segment_bytes": 10**400}, "segment_bytes"),
        ({"segment_bytes": 1, "nbytes": 1e12}, "segments"),
        ({"nbytes": 1e300}, "segments"),
        ({"algorithm": "nothing"}, "no algorithm"),
        ({"slow": {9: 2.0}}, "slow rank"),
        ({"slow": {0: -2.0}}, "slow"),
        ({"delay": {0: float("inf")}}, "delay"),
        ({"slow_links": {"no such": 2.0}}, "no link 'no such'"),
        ({"slow_links": {0: 0.0}}, "factor"),
        ({"lost_links": [1 << 40]}, "a link"),
        ({"fold": True, "slow": {0: 2.0}}, "symmetry"),
    ],
)
def test_a_wrong_argument_is_an_error(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        un.simulate("all_reduce", star(4), **{"algorithm": "ring", "nbytes": 8, **given})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"nbytes": "x"}, "nbytes"),
        ({"algorithm": 3}, "algorithm"),
        ({"slow": [1]}, "slow is a list"),
        ({"slow_links": {0: "a"}}, "slow link 0"),
        ({"lost_links": 5}, "lost_links"),
        ({"timeline": "a"}, "timeline"),
        ({"fold": "a"}, "fold"),
        ({"segment_bytes": 1.5}, "segment_bytes"),
        ({"network": 5}, "network"),
        ({"collective": 5}, "collective"),
        ({"algorithm": lambda *_: [5]}, "rank 0, step 0: got a int"),
        ({"algorithm": lambda *_: None}, "it gives rank 0 a NoneType"),
        ({"algorithm": lambda *_: [Send(Out(1 << 70), to=(1,))]}, "rank 0, step 0: .* is no chunk"),
    ],
)
def test_an_argument_of_another_type_is_an_error(given: dict[str, Any], text: str) -> None:
    arguments = {"collective": "all_reduce", "network": star(4), "algorithm": "ring", "nbytes": 8, **given}
    with pytest.raises(TypeError, match=text):
        un.simulate(**arguments)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Reduce(Out(0), frm=(1, 1)), "names a rank twice"),
        (Reduce(Out(0), frm=()), "has no contribution"),
        (Send(Out(0), to=(1, 1)), "names a rank twice"),
        (Send(Out(0), to=(0,)), "a message from rank 0 to itself"),
        (Recv(Out(0), frm=0), "a message from rank 0 to itself"),
    ],
)
def test_steps_that_no_plan_has_are_refused(step: Step, text: str) -> None:
    """Whether a function gives them or a plan holds them."""
    with pytest.raises(ValueError, match=text):
        un.simulate("all_reduce", star(2), algorithm=lambda rank, *_: [] if rank else [step], nbytes=8)
    plan = Plan("all_reduce", "own", 2, 0, ((step,), ()))
    with pytest.raises(ValueError, match=text):
        un.simulate("all_reduce", star(2), algorithm=plan, nbytes=8)


def test_steps_without_an_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["unisono.simulation.simulate"], "MOST_OWN_STEPS", 1000)
    with pytest.raises(ValueError, match="more than 1000 steps"):
        un.simulate(
            "broadcast", star(2), algorithm=lambda *_: itertools.repeat(Send(Out(0), to=(1,))), nbytes=8
        )


@pytest.mark.parametrize("to", [99, -1, 1 << 70])
def test_a_rank_that_is_not_there_is_named(to: int) -> None:
    with pytest.raises(ValueError, match="rank 0, step 0: a rank"):
        un.simulate("broadcast", star(4), algorithm=lambda *_: [Send(Out(0), to=(to,))], nbytes=8)
