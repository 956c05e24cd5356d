"""Why a rank was evicted: it finds out at its next call."""

from __future__ import annotations

from typing import NamedTuple

from unisono._native import Engine, Fate
from unisono.engine.membership.proposal import Phase, decode

__all__ = ["Eviction", "eviction"]


class Eviction(NamedTuple):
    """by: a rank that decided, or evicts; why: its reason."""

    by: int
    why: str


def eviction(engine: Engine, rank: int, size: int) -> Eviction | None:
    """How the other ranks of the group went on without this one; None: they did not."""
    evicted = engine.settle(rank, Fate.OPEN) == Fate.EVICTED
    own = decode(engine.proposal_of(rank)[1])
    if own is not None and own.phase is Phase.DECIDED:
        return None
    if own is not None and own.phase is Phase.RESIGNED:
        return Eviction(rank, own.text)
    found = None
    for other in range(size):
        version, encoded = engine.proposal_of(other)
        one = decode(encoded) if version and other != rank else None
        if one is None or one.alive >> rank & 1 or not (evicted or one.phase is Phase.DECIDED):
            continue
        why = dict(one.reasons).get(rank, "")
        if found is None or (why and not found.why):
            found = Eviction(other, why)
    if found is None and evicted:
        return Eviction(rank, "")
    return found
