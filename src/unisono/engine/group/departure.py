"""`Departure`: a rank that a group has lost."""

from __future__ import annotations

import msgspec

__all__ = ["Departure"]


class Departure(msgspec.Struct, frozen=True):
    """A rank that is not in the next group.

    Attributes:
        rank, host, pid: as in the group that it left.
        why: "ended by SIGKILL", "left because of ValueError: bad loss", "stopped", "late", "excluded",
            "cut off: its host does not answer".
        last_seen: its newest call: "in all_reduce #41", "after barrier #40".
        generation: of the group that it left.
    """

    rank: int
    host: str
    pid: int
    why: str
    last_seen: str
    generation: int
