"""What the context axis and the expert axis exchange in a micro-batch, priced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .hardware_prices import Collectives
    from .trace import TracedAttention, TracedStep

__all__ = ["ExchangeCalls", "PricedExchange", "SpreadExperts", "of_attentions", "of_experts"]

TOP = 2
"""Experts of a row: they are not known before a router runs."""

FEW_BYTES = 1024
"""Of numbers of rows, of experts, of weights."""

ROUTED = 35
"""Small operators that sort the rows of a layer of experts and put them back, in forward."""


class SpreadExperts(NamedTuple):
    """The experts of a model: modules called with their rows, their parameters, and a rank's share of all."""

    called: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    spread: float = 1.0


class ExchangeCalls(NamedTuple):
    """Calls of one kind in a pass: the bytes and the seconds of all of them."""

    collective: str
    ranks: int
    calls: int
    nbytes: float
    seconds: float


class PricedExchange(NamedTuple):
    """One exchange, forward and backward. `call`: the number of its module call."""

    cause: str
    call: int
    forward: tuple[ExchangeCalls, ...]
    backward: tuple[ExchangeCalls, ...]

    def charged(self, call_s: float) -> PricedExchange:
        """The same where each call takes so many seconds more."""
        forward, backward = (
            tuple(each._replace(seconds=each.seconds + each.calls * call_s) for each in calls)
            for calls in (self.forward, self.backward)
        )
        return self._replace(forward=forward, backward=backward)

    @property
    def forward_s(self) -> float:
        """Seconds of the forward."""
        return sum(each.seconds for each in self.forward)

    @property
    def backward_s(self) -> float:
        """Seconds of the backward."""
        return sum(each.seconds for each in self.backward)


def of_attentions(
    traced: TracedStep, collectives: Collectives, members: Sequence[int]
) -> list[PricedExchange]:
    """Each attention over a sequence that is cut: as a ring or by an exchange of heads, the cheaper one."""
    return [_attention(each, collectives, members) for each in traced.attentions]


def _attention(
    attention: TracedAttention, collectives: Collectives, members: Sequence[int]
) -> PricedExchange:
    """A ring sends keys and values n - 1 times, in backward again, and their gradients n times in f32."""
    ranks = len(members)
    queries, keys = attention.queries / ranks, attention.keys / ranks

    def hops(times: int, nbytes: float) -> ExchangeCalls:
        slowest = max(
            collectives.message(one, other, nbytes)
            for one, other in zip(members, [*members[1:], members[0]], strict=True)
        )
        return ExchangeCalls("message", 2, times, times * nbytes, times * slowest)

    there = (hops(ranks - 1, keys),)
    ring = PricedExchange("context", attention.call, there, (*there, hops(ranks, keys * 4 / attention.width)))
    if attention.heads % ranks:
        return ring
    one_way = tuple(  # queries and results, keys and values: each an all-to-all
        _exchanged(2, members, nbytes, collectives) for nbytes in (queries, keys / 2)
    )
    heads = PricedExchange("context", attention.call, one_way, one_way)
    return heads if 2 * heads.forward_s <= ring.forward_s + ring.backward_s else ring


def _exchanged(times: int, members: Sequence[int], nbytes: float, collectives: Collectives) -> ExchangeCalls:
    """So many exchanges of all ranks with all others."""
    taken = times * collectives.seconds("all_to_all", members, nbytes)
    return ExchangeCalls("all_to_all", len(members), times, times * nbytes, taken)


def of_experts(
    traced: TracedStep,
    paths: Collection[str],
    collectives: Collectives,
    members: Sequence[int],
    share: float,
) -> list[PricedExchange]:
    """Rows go once to each rank that has one of their experts, evenly spread, and back; twice, for backward.

    Forward also tells how many rows go, and sends the experts and the weights of each; backward the gradients
    of these weights.

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
            rows = _exchanged(2, members, call.nbytes * share * spread, collectives)
            few, one = (_exchanged(times, members, FEW_BYTES, collectives) for times in (3, 1))
            found.append(PricedExchange("experts", number, (rows, few), (rows, one)))
    return found
