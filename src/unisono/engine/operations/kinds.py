"""Every public collective call has a kind of its own. Ranks compare kinds, and errors name them.

A kind is more than a plan: `broadcast_object` runs the plan of `broadcast`, but must not match a `broadcast`.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.plans import CONTRACTS


class CallKind(NamedTuple):
    """A kind of call.

    Attributes:
        plan: the collective whose plan it runs.
        layout: the collective whose buffers it has, a key of `buffer_layout.SIDES`.
        rooted: its root matters though that of its plan does not.
    """

    plan: str
    layout: str
    rooted: bool = False


_TO_ONE = CallKind("all_gather", "all_gather_v", True)
"""Of calls whose result is on one rank: all ranks learn whether an object has more bytes than a packet."""

_TO_ALL = CallKind("all_gather", "all_gather_v")

_COMPOSED: dict[str, CallKind] = {
    "all_gather_v": _TO_ALL,
    "all_gather_object": _TO_ALL,
    "broadcast_object": CallKind("broadcast", "broadcast"),
    "gather_object": _TO_ONE,
    "scatter_object": CallKind("scatter", "scatter"),
    "all_to_all_object": CallKind("all_to_all", "all_to_all"),
    "all_reduce_coalesced": CallKind("all_reduce", "all_reduce"),
    "broadcast_coalesced": CallKind("broadcast", "broadcast"),
    "all_gather_coalesced": CallKind("all_gather", "all_gather"),
    "reduce_scatter_coalesced": CallKind("reduce_scatter", "reduce_scatter"),
    "split": _TO_ALL,
    "subgroup": CallKind("barrier", "barrier"),
    "reduce_object": _TO_ONE,
    "all_reduce_object": _TO_ALL,
    "scan_object": _TO_ALL,
    "exscan_object": _TO_ALL,
    "gather_object_bytes": CallKind("gather", "gather"),
}

_OF_NAME = {**{name: CallKind(name, name) for name in CONTRACTS}, **_COMPOSED}

KINDS: tuple[str, ...] = tuple(_OF_NAME)
"""Names of the kinds; a kind's index is its number in the engine."""


def kind_of(name: str) -> CallKind:
    """The kind of a public call."""
    return _OF_NAME[name]
