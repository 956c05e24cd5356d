"""Plans and placements: proofs for uneven hosts, what passes the links, what is chosen, a rank's own code."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import cases
from loops import each
from unisono.engine.costs import plan_cost
from unisono.engine.costs.tuner import CANDIDATES, ROUNDING, Tuner, choose
from unisono.errors import PlanError
from unisono.plans import ALGORITHMS, CONTRACTS, PLACED, by_host, lower, lower_rank, make, prove
from unisono.plans.aggregator import aggregator
from unisono.plans.double_tree import parent
from unisono.plans.torus import grid

NAMES = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective]]
ON_HOSTS = [(collective, name) for collective in PLACED for name in PLACED[collective]]
PLACEMENTS = [
    (0, 0, 0, 1, 1, 2),
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 1, 2, 3),
    (0, 1, 1, 1),
    (2, 0, 0, 1, 2, 1, 2),
    (0,) * 5 + (1,) * 4 + (2,) * 3 + (3,) * 2,
]
LARGE = cases(
    [(0, 1) + (2,) * 14, tuple(rank // 2 for rank in range(16)), tuple(rank % 2 for rank in range(18))],
    long=[
        (0,) + (1,) * 32,
        (0, 0) + (1,) * 32,
        (0, 1) + (2,) * 32,
        tuple(rank // 2 for rank in range(32)),
        tuple(rank % 2 for rank in range(36)),
        tuple(range(32)),
        (0,) * 40 + (1,) * 13 + (2,),
    ],
)


def roots(collective: str, size: int) -> range:
    return range(size if CONTRACTS[collective].rooted else 1)


@each("hosts", PLACEMENTS)
@each(("collective", "algorithm"), ON_HOSTS)
def test_proved_on_uneven_hosts(collective: str, algorithm: str, hosts: tuple[int, ...]) -> None:
    for root in roots(collective, len(hosts)):
        prove(make(collective, algorithm, len(hosts), root, hosts))


@each("hosts", LARGE)
@each(("collective", "algorithm"), ON_HOSTS)
def test_proved_on_large_hosts(collective: str, algorithm: str, hosts: tuple[int, ...]) -> None:
    prove(make(collective, algorithm, len(hosts), 0, hosts))


@given(st.sampled_from(ON_HOSTS), st.lists(st.integers(0, 5), min_size=1, max_size=17), st.integers(0, 16))
@settings(max_examples=150, deadline=None)
def test_proved_on_any_partition(name: tuple[str, str], hosts: list[int], root: int) -> None:
    prove(make(*name, len(hosts), root % len(hosts) if CONTRACTS[name[0]].rooted else 0, tuple(hosts)))


@each("hosts", [(), *PLACEMENTS[:3], PLACEMENTS[-1]])
@each(("collective", "algorithm"), NAMES)
def test_a_ranks_own_code_is_that_of_the_whole_plan(
    collective: str, algorithm: str, hosts: tuple[int, ...]
) -> None:
    for size in [len(hosts)] if hosts else (1, 2, 3, 5, 8, 11):
        for root in {0, size - 1} if CONTRACTS[collective].rooted else {0}:
            code = lower(make(collective, algorithm, size, root, hosts))
            assert [lower_rank(r, collective, algorithm, size, root, hosts) for r in range(size)] == code


# ---- what passes the links -----------------------------------------------------------------------------


@each("hosts", [*PLACEMENTS, *LARGE])
def test_all_reduce_carries_no_more_than_the_bound(hosts: tuple[int, ...]) -> None:
    """Each of h links 2(h-1)/h of the buffer both ways, even where hosts hold different numbers of ranks."""
    count = len(set(hosts))
    bound = Fraction(2 * (count - 1), count)
    found = plan_cost.link_bytes(make("all_reduce", "hierarchical", len(hosts), 0, hosts))
    assert set(found.values()) == {(bound, bound)}


@each("hosts", [*PLACEMENTS, *LARGE])
def test_links_carry_each_byte_once(hosts: tuple[int, ...]) -> None:
    size, inside = len(hosts), {hosts[ranks[0]]: len(ranks) for ranks in by_host(hosts)}
    for root in (0, size - 1):
        for collective, way in (("broadcast", 1), ("reduce", 0)):
            links = plan_cost.link_bytes(make(collective, "hierarchical", size, root, hosts))
            assert all(max(link) <= 1 for link in links.values())
            assert all(link[way] == 1 for host, link in links.items() if host != hosts[root])
    gathers, scatters = (
        plan_cost.link_bytes(make(name, "hierarchical", size, 0, hosts))
        for name in ("all_gather", "reduce_scatter")
    )
    for host, ranks in inside.items():
        others = Fraction(size - ranks, size)
        assert gathers[host][1] == scatters[host][0] == others
        assert max(gathers[host][0], scatters[host][1]) < 1
    for name, way in (("gather", 0), ("scatter", 1)):
        links = plan_cost.link_bytes(make(name, "hierarchical", size, 0, hosts))
        assert all(link[way] == Fraction(inside[h], size) for h, link in links.items() if h != hosts[0])


def test_the_aggregators_hosts_take_half_of_what_a_ring_needs() -> None:
    """Every host but the aggregator's sends its sum once and takes the result once."""
    hosts = (0, 0, 1, 1, 2)
    assert aggregator(hosts) == 4
    links = plan_cost.link_bytes(make("all_reduce", "aggregator", 5, 0, hosts))
    assert links == {0: (1, 1), 1: (1, 1), 2: (2, 2)}


# ---- the chooser ---------------------------------------------------------------------------------------


def test_on_one_host_direct_algorithms_are_chosen() -> None:
    for hosts in ((), (0,) * 4, (7,) * 4):
        assert choose("all_reduce", 4, 4, hosts) == "one_shot"
        assert choose("all_reduce", 4, 1 << 20, hosts) == "two_shot"
        assert choose("barrier", 4, 0, hosts) == "direct"
        assert choose("reduce_scatter", 4, 1 << 20, hosts) == "direct"
    assert choose("all_reduce", 17, 4) == choose("barrier", 17, 0) == "leaders"
    assert choose("all_reduce", 17, 1 << 20) == "two_shot"


def test_on_several_hosts_small_buffers_go_by_leaders_and_large_ones_by_all_ranks() -> None:
    for hosts in ((0, 0, 1, 1), (0, 0, 0, 1, 1, 2), tuple(rank // 2 for rank in range(8))):
        assert choose("all_reduce", len(hosts), 4, hosts) == "leaders"
        assert choose("all_reduce", len(hosts), 64 << 20, hosts) == "hierarchical"
        assert choose("all_gather", len(hosts), 64 << 20, hosts) == "hierarchical"
        assert choose("reduce_scatter", len(hosts), 64 << 20, hosts) == "hierarchical"


@each("hosts", PLACEMENTS)
def test_the_cheapest_is_chosen(hosts: tuple[int, ...]) -> None:
    chooser = Tuner(len(hosts), hosts)
    for collective, candidates in CANDIDATES.items():
        assert set(candidates) <= set(ALGORITHMS[collective])
        for nbytes in (0, 1000, 1 << 20, 1 << 28):
            chosen = chooser.choose(collective, nbytes)
            whole = nbytes * len(hosts) if collective in ("all_gather", "reduce_scatter") else nbytes
            prices = {name: chooser.price(collective, name)(whole) for name in candidates}
            assert prices[chosen] == min(prices.values())
            if len(candidates) > 1 and len(set(hosts)) > 1:
                for name, bound in chooser.bounds(collective).items():
                    assert bound(whole) <= prices[name] * (1 + ROUNDING), (collective, name)


def test_hosts_of_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="got the hosts of 3 ranks, expected 4"):
        make("all_reduce", "hierarchical", 4, 0, (0, 0, 1))


# ---- shapes --------------------------------------------------------------------------------------------


def test_the_grid_of_a_torus() -> None:
    assert grid((0,) * 6) == [(0, 1, 2), (3, 4, 5)]
    assert grid((0, 1, 0, 1)) == [(0, 2), (1, 3)]
    assert grid((0,) * 7) == [(0, 1, 2, 3, 4, 5, 6)]


@each("size", range(1, 40))
def test_in_order_trees(size: int) -> None:
    """One root, everybody below it, two children at most, odd places are leaves, depth of log2."""
    above = {place: parent(place, size) for place in range(1, size + 1)}
    assert list(above.values()).count(0) == 1
    for place in above:
        children = [child for child, up in above.items() if up == place]
        assert len(children) <= (0 if place % 2 else 2)
        steps = 0
        while place:
            place, steps = above[place], steps + 1
        assert steps <= size.bit_length()
