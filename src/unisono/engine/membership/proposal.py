"""A proposal: what a rank publishes about the membership that follows, in memory and in frames.

A set of ranks is an integer: bit r stands for rank r.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from unisono import _native
from unisono.errors import NotSupported

__all__ = ["MOST_RANKS", "MembershipProposal", "Phase", "cut", "decode", "encode", "members", "ranks_of"]

MOST_RANKS = 1600
"""Two sets and the reasons of some ranks fit into a proposal."""

MOST_REASONS = 24
"""The reasons that a proposal tells; a rank that is out without one is out all the same."""

MOST_TEXT = 160
"""Bytes of a reason or a refusal."""


class Phase(enum.IntEnum):
    """How far a rank's agreement is.

    Each phase is left for the next one, or, after a change of the set, for PROPOSED. The last three are
    final.
    """

    PROPOSED = 1
    ACKNOWLEDGED = 2  # every rank of the set proposes this set
    DECIDED = 3  # every rank of the set has acknowledged it
    RESIGNED = 4  # this rank takes no part in the next membership
    REFUSED = 5  # the ranks' calls of this attempt do not fit


class MembershipProposal(msgspec.Struct, frozen=True, array_like=True):
    """What a rank publishes.

    Attributes:
        attempt: the number of its call of `shrink` in this group; proposals of one attempt are compared.
        alive: the ranks that it holds alive, as bytes of the integer; itself among them.
        gone: the ranks that can never decide: they have ended or left, or their own host evicts them.
        excluded: the ranks that its caller excludes.
        reasons: (rank, why it is out).
        text: of a refusal.
        following: identifies a next group that this rank has made already; "": it is made after the decision.
        again: of a refusal: see `Agreement`.
    """

    attempt: int
    phase: Phase
    alive: int
    gone: int
    excluded: tuple[int, ...] = ()
    reasons: tuple[tuple[int, str], ...] = ()
    text: str = ""
    following: str = ""
    again: bool = False


class _Wire(msgspec.Struct, array_like=True):
    attempt: int
    phase: Phase
    alive: bytes
    gone: bytes
    excluded: list[int]
    reasons: list[tuple[int, str]]
    text: str
    following: str
    again: bool


_decode = msgspec.msgpack.Decoder(_Wire).decode


def cut(text: str) -> str:
    """The beginning of a text, of at most MOST_TEXT bytes. Example: a text of 100 times "é" has 80 left."""
    return text.encode(errors="replace")[:MOST_TEXT].decode(errors="ignore")


def members(ranks: Iterable[int]) -> int:
    """The set of these ranks. Example: members([0, 2]) -> 0b101"""
    found = 0
    for rank in ranks:
        found |= 1 << rank
    return found


def ranks_of(found: int) -> list[int]:
    """The ranks of a set, in order. Example: ranks_of(0b101) -> [0, 2]"""
    return [rank for rank in range(found.bit_length()) if found >> rank & 1]


def encode(proposal: MembershipProposal, size: int) -> bytes:
    """A proposal as bytes.

    Raises:
        NotSupported: the group is too large.
    """
    if size > MOST_RANKS:
        raise NotSupported(f"shrink: a group of {size} ranks, and the most are {MOST_RANKS}")
    width = -(-size // 8)
    wire = _Wire(
        proposal.attempt,
        proposal.phase,
        proposal.alive.to_bytes(width, "little"),
        proposal.gone.to_bytes(width, "little"),
        list(proposal.excluded),
        list(proposal.reasons[:MOST_REASONS]),
        cut(proposal.text),
        cut(proposal.following),
        proposal.again,
    )
    while len(encoded := msgspec.msgpack.encode(wire)) > _native.PROPOSAL_BYTES:
        if wire.reasons:
            wire.reasons.pop()
        else:
            raise NotSupported(f"shrink: a list of {len(wire.excluded)} excluded ranks is too long")
    return encoded


def decode(encoded: bytes) -> MembershipProposal | None:
    """The proposal; None where the bytes are none."""
    try:
        wire = _decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    alive, gone = int.from_bytes(wire.alive, "little"), int.from_bytes(wire.gone, "little")
    return MembershipProposal(
        wire.attempt,
        wire.phase,
        alive,
        gone,
        tuple(wire.excluded),
        tuple(wire.reasons),
        wire.text,
        wire.following,
        wire.again,
    )
