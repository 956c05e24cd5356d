"""What collectives and messages between the ranks of a job take, by the engine's cost model."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from unisono.codecs.codec import Codec
from unisono.engine.costs.machine import MachineCalibration
from unisono.engine.costs.tuner import Tuner
from unisono.engine.group.codec_arguments import BLOCK_OF_ALL
from unisono.engine.group.codec_planning import coded_algorithm
from unisono.plans.coded_edges import ALL, BETWEEN

__all__ = ["CollectiveCosts"]


class CollectiveCosts:
    """Prices of one job.

    Args:
        machine: the figures of its hosts. Between hosts those of the network count, as for the engine.
        hosts: number of the host of each rank, by rank.
        turn_s: more of each call, see `SharedSteps`.
    """

    def __init__(self, machine: MachineCalibration, hosts: Sequence[int], turn_s: float = 0.0) -> None:
        self._machine = machine.between_networks() if len(set(hosts)) > 1 else machine
        self._hosts, self._turn_s = tuple(hosts), turn_s
        self._price = functools.cache(self._priced)
        self._tuner = functools.cache(self._of)

    @property
    def here(self) -> int:
        """Ranks of the host that has most."""
        return max(self._hosts.count(host) for host in set(self._hosts))

    def seconds(self, collective: str, members: Sequence[int], nbytes: float) -> float:
        """A call among these ranks, while all other groups of the job make theirs.

        Args:
            nbytes: of the whole buffer: of an all_gather the result, of a reduce_scatter the input.
        """
        hosts = tuple(self._hosts[rank] for rank in members)
        if len(hosts) < 2:
            return 0.0
        return self._price(collective, hosts, max(1, round(nbytes))) + self._turn_s

    def coded(self, members: Sequence[int], nbytes: float, codec: Codec) -> float:
        """An all_reduce of f32 values that travel as codes: between hosts only, where there are several.

        Args:
            nbytes: of the values.
        """
        hosts = tuple(self._hosts[rank] for rank in members)
        if len(hosts) < 2:
            return 0.0
        edges = BETWEEN if len(set(hosts)) > 1 else ALL
        per_value = codec.nbytes(BLOCK_OF_ALL) / BLOCK_OF_ALL
        whole = max(1, round(nbytes))
        algorithm, _ = coded_algorithm("all_reduce", None, edges, whole)
        return (
            self._tuner(hosts).predict_coded("all_reduce", algorithm, whole, per_value, edges) + self._turn_s
        )

    def message(self, sender: int, receiver: int, nbytes: float, beside: int = 1) -> float:
        """A message between two ranks, at one end.

        Args:
            beside: ranks that send at the same time; between hosts those of a host share its link.
        """
        machine = self._machine
        if self._hosts[sender] != self._hosts[receiver]:
            shared = min(beside, self.here)
            return 2 * machine.tcp_s + nbytes * shared / machine.tcp
        rate = min(machine.take, machine.copy.all_memory)
        return machine.flag_s + nbytes / rate

    def _priced(self, collective: str, hosts: tuple[int, ...], nbytes: int) -> float:
        tuner = self._tuner(hosts)
        per_rank = -(-nbytes // len(hosts)) if collective in ("all_gather", "reduce_scatter") else nbytes
        return tuner.predict(collective, tuner.choose(collective, per_rank), nbytes)

    def _of(self, hosts: tuple[int, ...]) -> Tuner:
        """The tuner of such a group; its ranks have their share of the cores, and of their host's link."""
        cores, tcp = self._machine.cores, self._machine.tcp
        if cores and len(set(hosts)) == 1:
            cores = max(1, cores * len(hosts) // max(self.here, len(hosts)))
        if len(set(hosts)) > 1:  # the other groups of a host call at the same time
            tcp /= max(1, self.here // max(hosts.count(host) for host in hosts))
        return Tuner(len(hosts), hosts, msgspec.structs.replace(self._machine, cores=cores, tcp=tcp))
