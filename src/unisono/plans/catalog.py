"""All algorithms by collective and name. A new one needs its function and one line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from unisono.engine.base.validation import instance, listed, whole
from unisono.errors import PlanError
from unisono.plans import (
    aggregator,
    direct,
    dissemination,
    double_tree,
    doubling,
    halving,
    hierarchical,
    linear,
    one_hop,
    pairwise,
    ring,
    torus,
    tree,
)
from unisono.plans.coded_edges import coded_edges, separate_codes
from unisono.plans.plan import MOST_RANKS, Plan, Step, StepFunction, build

__all__ = ["ALGORITHMS", "FLAT", "PLACED", "algorithm_names", "make", "steps_of"]

PlacedFunction = Callable[[int, tuple[int, ...], int], Iterable[Step]]
"""An algorithm that uses hosts: (rank, host of every rank, root) -> the steps of that rank."""

FLAT: dict[str, dict[str, StepFunction]] = {
    "broadcast": {
        "direct": direct.broadcast,
        "binomial": tree.broadcast,
        "linear": linear.broadcast,
        "double_tree": double_tree.broadcast,
    },
    "reduce": {"direct": direct.reduce, "binomial": tree.reduce},
    "all_reduce": {
        "one_shot": direct.all_reduce_one_shot,
        "two_shot": direct.all_reduce_two_shot,
        "ring": ring.all_reduce,
        "binomial": tree.all_reduce,
        "doubling": doubling.all_reduce,
        "halving_doubling": halving.all_reduce,
        "double_tree": double_tree.all_reduce,
    },
    "gather": {"direct": direct.gather, "binomial": tree.gather},
    "all_gather": {
        "direct": direct.all_gather,
        "ring": ring.all_gather,
        "doubling": doubling.all_gather,
        "bruck": doubling.bruck,
        "gather_broadcast": tree.gather_broadcast,
    },
    "scatter": {"direct": direct.scatter, "binomial": tree.scatter},
    "reduce_scatter": {
        "direct": direct.reduce_scatter,
        "ring": ring.reduce_scatter,
        "halving": halving.reduce_scatter,
    },
    "all_to_all": {"direct": direct.all_to_all, "pairwise": pairwise.all_to_all},
    "scan": {"direct": direct.scan, "linear": linear.scan},
    "exclusive_scan": {"direct": direct.exclusive_scan},
    "barrier": {"direct": direct.barrier, "dissemination": dissemination.barrier},
}
"""Algorithms that use rank numbers only."""

PLACED: dict[str, dict[str, PlacedFunction]] = {
    "broadcast": {
        "hierarchical": hierarchical.broadcast,
        "leaders": hierarchical.leaders_broadcast,
        "one_hop": one_hop.broadcast,
    },
    "reduce": {
        "hierarchical": hierarchical.reduce,
        "leaders": hierarchical.leaders_reduce,
        "one_hop": one_hop.reduce,
    },
    "all_reduce": {
        "hierarchical": hierarchical.all_reduce,
        "leaders": hierarchical.leaders_all_reduce,
        "one_hop": one_hop.all_reduce,
        "torus": torus.all_reduce,
        "aggregator": aggregator.all_reduce,
    },
    "gather": {"hierarchical": hierarchical.gather},
    "all_gather": {"hierarchical": hierarchical.all_gather, "one_hop": one_hop.all_gather},
    "scatter": {"hierarchical": hierarchical.scatter},
    "reduce_scatter": {
        "hierarchical": hierarchical.reduce_scatter,
        "one_hop": one_hop.reduce_scatter,
    },
    "barrier": {"leaders": hierarchical.barrier},
}
"""Algorithms that use the host of each rank."""

ALGORITHMS: dict[str, dict[str, StepFunction | PlacedFunction]] = {
    collective: {**algorithms, **PLACED.get(collective, {})} for collective, algorithms in FLAT.items()
}


def algorithm_names() -> list[str]:
    """All names, each once, sorted; an algorithm's index here is its number in the engine.

    A new algorithm renumbers those after it, so all ranks need the same catalogue:
    `bootstrap.membership.version` includes it.
    """
    return sorted({name for algorithms in ALGORITHMS.values() for name in algorithms})


def steps_of(collective: str, algorithm: str, size: int, hosts: tuple[int, ...] = ()) -> StepFunction:
    """A catalogued algorithm for `size` ranks. hosts: the number of the host of each; (): one host.

    Raises:
        PlanError: there is no such algorithm for this collective, or hosts are not those of `size` ranks.
    """
    known = ALGORITHMS.get(instance(collective, str, "collective"))
    if known is None:
        raise PlanError(f"no collective {collective!r}: there are {', '.join(ALGORITHMS)}")
    if instance(algorithm, str, "algorithm") not in known:
        raise PlanError(f"{collective} has no algorithm {algorithm!r}; it has {', '.join(sorted(known))}")
    size = whole(size, "size", 1, MOST_RANKS)
    if hosts and len(hosts) != size:
        raise PlanError(f"{collective}/{algorithm}: got the hosts of {len(hosts)} ranks, expected {size}")
    if algorithm in FLAT[collective]:
        return FLAT[collective][algorithm]
    placed = PLACED[collective][algorithm]
    everywhere = hosts or (0,) * size
    return lambda rank, _, root: placed(rank, everywhere, root)


def make(
    collective: str,
    algorithm: str,
    size: int,
    root: int = 0,
    hosts: tuple[int, ...] = (),
    coding: str = "",
) -> Plan:
    """Build the plan of a catalogued algorithm for `size` ranks. hosts: the host of each; (): one host.

    coding: which edges carry codes, see `coded_edges`.

    Raises:
        PlanError: there is no such algorithm for this collective, or hosts are not those of `size` ranks.
    """
    hosts = tuple(whole(host, "host") for host in listed(hosts, "hosts"))
    steps = steps_of(collective, algorithm, size, hosts)
    root = whole(root, "root", 0, size - 1)
    edges = coded_edges(coding, hosts)
    steps = separate_codes(steps, edges) if coding else steps
    return build(collective, algorithm, steps, size, root, hosts, coding)
