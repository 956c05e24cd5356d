"""What the context axis and the expert axis exchange in a micro-batch, priced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .collectives import CollectiveCosts
    from .traced_step import TracedAttention, TracedStep

__all__ = ["PricedExchange", "of_attentions", "of_experts"]

TOP = 2
"""Experts of a row: they are not known before a router runs."""


class PricedExchange(NamedTuple):
    """Seconds of one exchange, forward and backward. `call`: the number of its module call."""

    cause: str
    call: int
    forward_s: float
    backward_s: float


def of_attentions(
    traced: TracedStep, collectives: CollectiveCosts, members: Sequence[int]
) -> list[PricedExchange]:
    """Each attention over a sequence that is cut: as a ring or by an exchange of heads, the cheaper one."""
    return [_attention(each, collectives, members) for each in traced.attentions]


def _attention(
    attention: TracedAttention, collectives: CollectiveCosts, members: Sequence[int]
) -> PricedExchange:
    """A ring sends keys and values n - 1 times, in backward again, and their gradients n times in f32."""
    ranks = len(members)
    queries, keys = attention.queries / ranks, attention.keys / ranks

    def hop(nbytes: float) -> float:
        return max(
            collectives.message(one, other, nbytes)
            for one, other in zip(members, [*members[1:], members[0]], strict=True)
        )

    ring = (ranks - 1) * hop(keys), (ranks - 1) * hop(keys) + ranks * hop(keys * 4 / attention.width)
    if attention.heads % ranks == 0:  # queries and results, keys and values: each an all-to-all
        one_way = 2 * collectives.seconds("all_to_all", members, queries)
        one_way += 2 * collectives.seconds("all_to_all", members, keys / 2)
        if 2 * one_way <= sum(ring):
            ring = one_way, one_way
    return PricedExchange("context", attention.call, *ring)


def of_experts(
    traced: TracedStep,
    paths: Collection[str],
    collectives: CollectiveCosts,
    members: Sequence[int],
    share: float,
) -> list[PricedExchange]:
    """Rows go once to each rank that has one of their experts, evenly spread, and back; twice, for backward.

    Args:
        paths: of the modules that are called with the rows of a layer of experts.
        share: of these rows, that a rank has.
    Example: on two ranks a row of two experts goes to 2 * (1 - 1/4) = 1.5 of them.
    """
    ranks = len(members)
    spread = ranks * (1 - (1 - 1 / ranks) ** TOP)
    found = []
    for number, call in enumerate(traced.calls):
        if call.path in paths:
            taken = 2 * collectives.seconds("all_to_all", members, call.nbytes * share * spread)
            found.append(PricedExchange("experts", number, taken, taken))
    return found
