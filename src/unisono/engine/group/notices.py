"""Tells the launcher of an elastic job how the group of this rank has changed."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

from unisono.engine.diagnosis import launcher_socket
from unisono.engine.diagnosis.report import LostRank, MembershipNotice
from unisono.engine.store.address import address_text

if TYPE_CHECKING:
    from unisono.engine.group.membership import MembershipGroup

__all__ = ["announce"]


def announce(group: MembershipGroup) -> None:
    """Tell the launcher, if it asks for it (UNISONO_ELASTIC), who is in the group, and where it listens."""
    settings = group._settings
    if settings is None or settings.elastic is None or settings.report_fd is None:
        return
    planner, identity = group._planner, group._identity
    assert identity is not None  # an elastic group has one
    peers = identity.membership.peers
    place = peers[group.rank].place
    own = () if planner.listener is None else (address_text(*planner.listener.address),)
    notice = MembershipNotice(
        pid=os.getpid(),
        new_rank=group.rank,
        generation=group.generation,
        size=group.size,
        here=tuple(info.pid for info in peers if info.place == place),
        left=tuple(LostRank(one.rank, one.host, one.pid, one.why) for one in group.left),
        listens=bool(own),
        addresses=tuple(dict.fromkeys((*own, *planner.addresses))),
    )
    with contextlib.suppress(OSError):  # the launcher has ended: it ends this process, too
        launcher_socket.send(*settings.report_fd, msgspec.json.encode(notice))
