"""Every algorithm there is, by collective and name. A new one takes its function and one line here."""

from __future__ import annotations

from unisono.errors import PlanError
from unisono.plans import direct, dissemination, linear, ring, tree
from unisono.plans.plan import Plan, StepFunction, build

__all__ = ["ALGORITHMS", "algorithm_names", "make"]

ALGORITHMS: dict[str, dict[str, StepFunction]] = {
    "broadcast": {"direct": direct.broadcast, "binomial": tree.broadcast, "linear": linear.broadcast},
    "reduce": {"direct": direct.reduce, "binomial": tree.reduce},
    "all_reduce": {
        "one_shot": direct.all_reduce_one_shot,
        "two_shot": direct.all_reduce_two_shot,
        "ring": ring.all_reduce,
        "binomial": tree.all_reduce,
    },
    "gather": {"direct": direct.gather},
    "all_gather": {"direct": direct.all_gather, "ring": ring.all_gather},
    "scatter": {"direct": direct.scatter},
    "reduce_scatter": {"direct": direct.reduce_scatter, "ring": ring.reduce_scatter},
    "all_to_all": {"direct": direct.all_to_all},
    "scan": {"direct": direct.scan, "linear": linear.scan},
    "exclusive_scan": {"direct": direct.exclusive_scan},
    "barrier": {"dissemination": dissemination.barrier},
}


def algorithm_names() -> list[str]:
    """All names, each once; an algorithm's place here is its number in the engine."""
    return sorted({name for algorithms in ALGORITHMS.values() for name in algorithms})


def make(collective: str, algorithm: str, size: int, root: int = 0) -> Plan:
    """Build the plan of a catalogued algorithm for `size` ranks.

    Raises:
        PlanError: there is no such algorithm for this collective.
    """
    known = ALGORITHMS[collective]
    if algorithm not in known:
        raise PlanError(f"{collective} has no algorithm {algorithm!r}; it has {', '.join(sorted(known))}")
    return build(collective, algorithm, known[algorithm], size, root)
