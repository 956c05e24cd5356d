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
    """

    plan: str
    layout: str


_COMPOSED: dict[str, CallKind] = {
    "all_gather_v": CallKind("all_gather", "all_gather_v"),
    "all_gather_object": CallKind("all_gather", "all_gather_v"),
    "broadcast_object": CallKind("broadcast", "broadcast"),
    "gather_object": CallKind("gather", "gather"),
    "scatter_object": CallKind("scatter", "scatter"),
    "all_reduce_coalesced": CallKind("all_reduce", "all_reduce"),
    "broadcast_coalesced": CallKind("broadcast", "broadcast"),
    "all_gather_coalesced": CallKind("all_gather", "all_gather"),
    "reduce_scatter_coalesced": CallKind("reduce_scatter", "reduce_scatter"),
    "split": CallKind("all_gather", "all_gather_v"),
    "subgroup": CallKind("barrier", "barrier"),
    "reduce_object": CallKind("gather", "gather"),
    "all_reduce_object": CallKind("gather", "gather"),
    "scan_object": CallKind("gather", "gather"),
}

_OF_NAME = {**{name: CallKind(name, name) for name in CONTRACTS}, **_COMPOSED}

KINDS: tuple[str, ...] = tuple(_OF_NAME)
"""Names of the kinds; a kind's index is its number in the engine."""


def kind_of(name: str) -> CallKind:
    """The kind of a public call."""
    return _OF_NAME[name]
