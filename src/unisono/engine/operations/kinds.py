"""Every public collective call has a kind of its own. Ranks compare kinds, and errors name them.

A kind is more than a plan: `broadcast_object` runs the plan of `broadcast`, but must not match a `broadcast`.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.plans import CONTRACTS


class Kind(NamedTuple):
    """A kind of call.

    Attributes:
        plan: the collective whose plan it runs.
        layout: the collective whose buffers it has, see `layout`.
    """

    plan: str
    layout: str


_COMPOSED: dict[str, Kind] = {
    "all_gather_v": Kind("all_gather", "all_gather_v"),
    "all_gather_object": Kind("all_gather", "all_gather_v"),
    "broadcast_object": Kind("broadcast", "broadcast"),
    "gather_object": Kind("gather", "gather"),
    "scatter_object": Kind("scatter", "scatter"),
    "all_reduce_coalesced": Kind("all_reduce", "all_reduce"),
    "broadcast_coalesced": Kind("broadcast", "broadcast"),
    "all_gather_coalesced": Kind("all_gather", "all_gather"),
    "reduce_scatter_coalesced": Kind("reduce_scatter", "reduce_scatter"),
    "split": Kind("all_gather", "all_gather_v"),
    "subgroup": Kind("barrier", "barrier"),
}

_OF_NAME = {**{name: Kind(name, name) for name in CONTRACTS}, **_COMPOSED}

KINDS: tuple[str, ...] = tuple(_OF_NAME)
"""Names of the kinds; a kind's index is its number in the engine."""


def kind_of(name: str) -> Kind:
    """The kind of a public call."""
    return _OF_NAME[name]
