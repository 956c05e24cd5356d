"""Prices of hardware files, for GPUs that this machine need not have: links as in `unisono plan`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unisono.errors import UnfitError
from unisono.parallel.plan import Plan
from unisono.planner.hardware import slowest
from unisono.planner.interconnect import Interconnect, RankLayout, all_to_all_s, collective_s, message_s

from .collectives import CollectiveCosts

if TYPE_CHECKING:
    from unisono.codecs.codec import Codec
    from unisono.engine.costs.machine import MachineCalibration
    from unisono.planner.compute_calibration import ComputeCalibration
    from unisono.planner.hardware import Hardware

__all__ = ["Collectives", "LinkCosts", "costs_of", "links_of", "source_of", "swap_rate"]


class LinkCosts:
    """Prices of one job, as `CollectiveCosts` has them for this machine.

    Args:
        hardware: of each host.    hosts: number of the host of each rank, by rank.
    """

    def __init__(self, hardware: Sequence[Hardware], hosts: Sequence[int]) -> None:
        self._hardware, self._hosts = tuple(hardware), tuple(hosts)
        self._slowest = functools.cache(self._of)

    def seconds(self, collective: str, members: Sequence[int], nbytes: float) -> float:
        """A call among these ranks, while all other groups of the job make theirs.

        Args:
            nbytes: of the whole buffer: of an all_gather the result, of a reduce_scatter the input.
        """
        here = Counter(self._hosts[rank] for rank in members)
        links, share = self._slowest(frozenset(here))
        layout = RankLayout(len(members), max(here.values()))
        if collective == "all_to_all":
            return all_to_all_s(layout, nbytes, links, share)
        return collective_s(collective, layout, nbytes, links, share)

    def coded(self, members: Sequence[int], nbytes: float, codec: Codec) -> float:
        """Raise ValueError: no codec runs on a GPU."""
        del members, nbytes, codec
        raise UnfitError("compression takes f32 gradients in CPU memory, and the hosts have GPUs")

    def message(self, sender: int, receiver: int, nbytes: float, beside: int = 1) -> float:
        """A message between two ranks, at one end. Each rank has its own share of the ports."""
        del beside
        ends = {self._hosts[sender], self._hosts[receiver]}
        links, share = self._slowest(frozenset(ends))
        return message_s(nbytes, links, share, inside=len(ends) == 1)

    def _of(self, hosts: frozenset[int]) -> tuple[Interconnect, float]:
        """The slowest links of these hosts, and the share of their rates that a step gets."""
        found = slowest([*{id(self._hardware[host]): self._hardware[host] for host in hosts}.values()])
        links = Interconnect(found.name, found.ranks, found.inside, found.between)
        return links, found.efficiency.links


Collectives = CollectiveCosts | LinkCosts


def costs_of(
    machine: MachineCalibration, hardware: Sequence[Hardware], hosts: Sequence[int], turn_s: float
) -> Collectives:
    """The prices of collectives: of hardware, or of this machine."""
    return LinkCosts(hardware, hosts) if hardware else CollectiveCosts(machine, hosts, turn_s)


def source_of(compute: ComputeCalibration, hardware: Sequence[Hardware], *, own_device: bool) -> str:
    """Where the costs of operators are from, that were given."""
    if hardware:
        return f"a roofline of {_names(hardware)}"
    if not own_device:
        return "given"
    measured = all(each.launch_s is not None for each in compute.settings)
    return "measured on this device" if measured else "a roofline of this device"


def links_of(hardware: Sequence[Hardware], otherwise: str) -> str:
    """Where the costs of collectives are from."""
    return f"the links of {_names(hardware)}" if hardware else otherwise


def _names(hardware: Sequence[Hardware]) -> str:
    return " and ".join(dict.fromkeys(each.name for each in hardware))


def swap_rate(plan: Plan, machine: MachineCalibration, hardware: Sequence[Hardware]) -> float:
    """Bytes per second between a rank and where it swaps, on the slowest of these hosts.

    Raises:
        ValueError: the plan swaps, and a hardware file says nothing about its host.
    """
    silent = [each.name for each in hardware if each.host is None]
    if plan.swap is not None and silent:
        raise UnfitError(f"swap={plan.swap!r}: the file of {silent[0]} has no [host] with a rate")
    rates = [each.host.bytes_per_s for each in hardware if each.host is not None]
    return min(rates, default=machine.copy.memory)
