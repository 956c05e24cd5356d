"""What the log says of a group: how it is made, and what became of the one before."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

from unisono.engine.environment.env import listing
from unisono.engine.environment.event_log import LOG

if TYPE_CHECKING:
    from unisono.engine.group.membership import MembershipGroup

__all__ = ["log_group"]

PACKAGES = ("unisono", "numpy", "torch")
PLACEMENT = (
    "rank", "world_size", "local_rank", "local_world_size", "group_rank", "master_addr", "master_port",
    "status_fd", "report_fd", "store_address",
)  # fmt: skip
"""Settings that a launcher gives each rank."""


def log_group(group: MembershipGroup) -> None:
    """The versions, and what the group is made of."""
    if not LOG.introduced:
        _introduce(group)
    planner = group._planner
    hosts = list(dict.fromkeys(group._hosts))
    of_job = f", ranks {', '.join(map(str, planner.members))} of the job" if planner.members else ""
    where = f"host {hosts[0]}" if len(hosts) == 1 else f"hosts {', '.join(hosts[:8])}"
    LOG.info(
        "init",
        f"group {group.name}: rank {group.rank} of {group.size}{of_job}; {where}"
        f"{', ...' if len(hosts) > 8 else ''}; timeout {group.timeout_s:g} s",
    )
    if group.generation:
        _log_change(group)
    _log_transports(group)


def _introduce(group: MembershipGroup) -> None:
    """The versions and settings of this process, once."""
    LOG.introduced = True
    loaded = [(name, getattr(sys.modules.get(name), "__version__", "")) for name in PACKAGES]
    versions = [f"{name} {version}" for name, version in loaded if version]
    LOG.info("init", f"{', '.join(versions)}, Python {platform.python_version()}, {platform.platform()}")
    if group._settings is not None:
        given = [
            f"{setting} = {value} ({origin})"
            for setting, value, origin in listing(group._settings)
            if origin != "default" and setting not in (*PLACEMENT, "token")
        ]
        LOG.info("env", f"settings: {', '.join(given)}")


def _log_transports(group: MembershipGroup) -> None:
    """How this rank reaches the others: in a line for each way, at level 2 for each rank."""
    identity, engine = group._identity, group._planner.engine
    if identity is None:
        return
    membership, settings = identity.membership, identity.settings
    here = [rank for rank in membership.local_ranks(group.rank) if rank != group.rank]
    away = [rank for rank in range(group.size) if rank != group.rank and rank not in here]
    within = "shared memory, large messages by one copy between processes"
    within = within if engine.zero_copy else "shared memory, staged"
    between = "TCP, encrypted by TLS 1.3" if settings.network.tls else "TCP"
    source = "measured here" if membership.machine.measured_here else "the defaults"
    LOG.info(
        "init",
        f"group {group.name}: {membership.staging_bytes} bytes of staging memory a rank, "
        f"{membership.cores(group.rank)} cores for the {len(here) + 1} ranks of this host, "
        f"calibration: {source}",
    )
    for ranks, way in ((here, within), (away, between)):
        if ranks:
            LOG.info("net", f"group {group.name}: {len(ranks)} rank{'s' if len(ranks) > 1 else ''} by {way}")
        for rank in ranks:
            peer = membership.peers[rank]
            LOG.debug("net", f"group {group.name}: rank {rank} (host {peer.name}, pid {peer.pid}) by {way}")


def _log_change(group: MembershipGroup) -> None:
    """A membership that follows another one."""
    gone = [f"rank {one.rank} (host {one.host}, pid {one.pid}): {one.why}" for one in group.left]
    left = f"; out: {'; '.join(gone)}" if gone else ""
    LOG.info(
        "elastic",
        f"group {group.name}: membership {group.generation}: {group.size} ranks{left}",
    )
