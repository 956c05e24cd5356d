"""Chooses the algorithm for an operation, a size and a placement.

On one host the direct algorithms are the fastest: a rank writes once for all its readers. On several hosts
the cost model prices the candidates, and the cheapest is chosen. All ranks use the figures of rank 0
(`machine.py`), because all have to choose the same algorithm.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from unisono.engine.base.validation import instance, whole
from unisono.engine.costs.machine import DEFAULTS, MachineCalibration
from unisono.engine.costs.plan_cost import busiest, seconds, sending, shared_seconds
from unisono.engine.costs.simulation import LinkCost
from unisono.plans import Plan, make
from unisono.plans.catalog import steps_of

ONE_SHOT_BYTES = 64 * 1024
"""Up to this size it is faster that every rank does all the work than to wait for a second round."""

DIRECT_RANKS = 16
"""Up to so many ranks, a barrier or a small reduction is direct; with more, it goes through a leader."""

CROWD_RANKS = 64
"""With more ranks on a host, every reduction of a whole buffer goes through a leader: messages between all
pairs would take memory and time for each pair, and so many ranks share few cores."""

SEGMENT_BYTES = 256 * 1024
"""Segment size of the cost model between hosts. The engine's segments are longer (2 MiB), but it forwards
parts before a segment is complete. The choices were measured with this size."""

ENGINE_S = 0.85e-6
"""Time of a message within a host, in addition to its flag: the engine at both ends, and waits."""


CODE_COPIES = 2
"""The time to encode or decode a value, in copies of a value."""


def edges(machine: MachineCalibration) -> tuple[LinkCost, LinkCost, float]:
    """A message within a host, one between hosts, and seconds per byte reduced, on such machines."""
    inside = LinkCost(machine.flag_s + ENGINE_S, 1 / machine.copy.all_memory)
    between = LinkCost(2 * machine.tcp_s, 1 / machine.tcp)  # through the kernels of two hosts
    return inside, between, 1 / machine.reduce.all_shared_cache


ROUNDING = 1e-9
"""The relative rounding error of a sum of seconds in another order."""

INSIDE, BETWEEN, REDUCING_S_PER_BYTE = edges(DEFAULTS)

CANDIDATES: dict[str, tuple[str, ...]] = {
    "broadcast": ("leaders", "hierarchical", "double_tree"),
    "reduce": ("leaders", "hierarchical"),
    "all_reduce": ("leaders", "halving_doubling", "hierarchical"),
    "gather": ("direct",),  # blocks may differ in size, which only the root knows
    "all_gather": ("hierarchical", "bruck", "doubling"),
    "scatter": ("direct",),
    "reduce_scatter": ("hierarchical", "halving"),
    "all_to_all": ("direct", "pairwise"),
    "scan": ("direct", "linear"),
    "exclusive_scan": ("direct",),
    "barrier": ("leaders", "dissemination"),
}
"""The candidates on several hosts; of equal prices the first counts."""


class CostCurve:
    """The seconds of an algorithm for any number of bytes, interpolated from three points of the model."""

    def __init__(self, plan: Plan, machine: MachineCalibration = DEFAULTS, share: float = 1.0) -> None:
        self._plan = plan
        inside, between, g = edges(machine)
        if share != 1.0:  # of the bytes are sent between hosts, for the price of encoding and decoding them
            between = LinkCost(between.a, between.b * share + 2 * CODE_COPIES / machine.copy.all_memory)
        self._edges = inside, between, g
        self._empty = self._seconds(0)

    def __call__(self, nbytes: float) -> float:
        """Seconds for a whole buffer of `nbytes`: the first segment's way, and what the others add."""
        if nbytes == 0:  # a barrier's price is found in half the time
            return self._empty
        first = min(nbytes / SEGMENT_BYTES, 1)
        further = nbytes / SEGMENT_BYTES - first
        return self._empty + (self._first - self._empty) * first + self._further * further

    @cached_property
    def _first(self) -> float:
        return self._seconds(SEGMENT_BYTES)

    @cached_property
    def _further(self) -> float:
        inside, between, g = self._edges
        return busiest(self._plan, SEGMENT_BYTES, inside=inside, between=between, g=g)

    def _seconds(self, nbytes: int) -> float:
        inside, between, g = self._edges
        return seconds(self._plan, nbytes, a=inside.a, b=inside.b, g=g, between=between)


class CostLowerBound:
    """A lower bound of an algorithm's seconds, from the steps of rank 0 alone: faster than a price."""

    def __init__(
        self, collective: str, algorithm: str, hosts: tuple[int, ...], machine: MachineCalibration = DEFAULTS
    ) -> None:
        size = len(hosts)
        steps = tuple(steps_of(collective, algorithm, size, hosts)(0, size, 0))
        one_rank = Plan(collective, algorithm, size, 0, (steps, *[()] * (size - 1)), hosts)
        inside, between, _ = edges(machine)
        self._empty = sending(one_rank, 0, 0, inside=inside, between=between)
        self._per_byte = (
            sending(one_rank, 0, SEGMENT_BYTES, inside=inside, between=between) - self._empty
        ) / SEGMENT_BYTES

    def __call__(self, nbytes: float) -> float:
        """Seconds for a whole buffer of `nbytes`; a `CostCurve` is never lower."""
        return self._empty + self._per_byte * nbytes


class AlgorithmChoice(NamedTuple):
    """The chosen algorithm and its price.

    Attributes:
        seconds: of a call, by the cost model.
        calibrated: whether the figures were measured on rank 0's machine.
    """

    algorithm: str
    seconds: float
    calibrated: bool


class Tuner:
    """Chooses for one group, and remembers the prices.

    Args:
        size: the number of ranks.  hosts: the number of the host of each; () stands for one host.
        machine: the figures of the model.
    """

    def __init__(
        self, size: int, hosts: tuple[int, ...] = (), machine: MachineCalibration = DEFAULTS
    ) -> None:
        self._size = size
        self._hosts = hosts
        self._machine = machine
        self._one_host = len(set(hosts)) <= 1
        self._bounds: dict[str, dict[str, CostLowerBound]] = {}
        self._prices: dict[tuple[str, str], CostCurve] = {}

    def choose(self, collective: str, nbytes: int) -> str:
        """The algorithm for `nbytes` per rank (all_gather, reduce_scatter: per block); ranks ask alike.

        The cheapest, the first of equals. To price a plan of many ranks takes a second: those that cannot be
        cheapest by their bounds are not priced.
        """
        if self._one_host:
            direct = self.direct(collective, nbytes)
            few = direct == "one_shot" or collective == "barrier"
            led = few and self._size > DIRECT_RANKS
            led |= collective == "all_reduce" and self._size > CROWD_RANKS
            return "leaders" if led else direct
        if len(CANDIDATES[collective]) == 1:
            return CANDIDATES[collective][0]
        whole = nbytes * self._size if collective in ("all_gather", "reduce_scatter") else nbytes
        bounds = {algorithm: bound(whole) for algorithm, bound in self.bounds(collective).items()}
        found: dict[str, float] = {}
        for algorithm in sorted(bounds, key=lambda each: bounds[each]):
            if found and bounds[algorithm] > min(found.values()) * (1 + ROUNDING):
                break
            found[algorithm] = self.price(collective, algorithm)(whole)
        return min(found, key=lambda algorithm: (found[algorithm], CANDIDATES[collective].index(algorithm)))

    def reason(self, collective: str, nbytes: int) -> str:
        """Why `choose` chooses as it does, in words."""
        if self._one_host:
            crowded = self.choose(collective, nbytes) == "leaders"
            return f"{self._size} ranks share a host: through a leader" if crowded else "one host"
        candidates = CANDIDATES[collective]
        if len(candidates) == 1:
            return "the only one between hosts"
        whole = nbytes * self._size if collective in ("all_gather", "reduce_scatter") else nbytes
        self.choose(collective, nbytes)
        prices = [
            f"{name} {self.price(collective, name)(whole) * 1e6:.3g} us"
            if (collective, name) in self._prices
            else f"{name} at least {self.bounds(collective)[name](whole) * 1e6:.3g} us"
            for name in candidates
        ]
        return f"the cheapest between hosts of {', '.join(prices)}"

    def bounds(self, collective: str) -> dict[str, CostLowerBound]:
        """What every candidate takes at least."""
        found = self._bounds.get(collective)
        if found is None:
            found = self._bounds[collective] = {
                algorithm: CostLowerBound(collective, algorithm, self._hosts, self._machine)
                for algorithm in CANDIDATES[collective]
            }
        return found

    def price(self, collective: str, algorithm: str) -> CostCurve:
        """What one of them takes."""
        found = self._prices.get((collective, algorithm))
        if found is None:
            plan = make(collective, algorithm, self._size, 0, self._hosts)
            found = self._prices[collective, algorithm] = CostCurve(plan, self._machine)
        return found

    def explain(self, collective: str, nbytes: int, algorithm: str | None = None) -> AlgorithmChoice:
        """The choice for a whole buffer of `nbytes`, or the `algorithm` given, and the time by the model.

        Raises:
            ValueError: there is no such collective or algorithm.
        """
        if instance(collective, str, "collective") not in CANDIDATES:
            raise ValueError(f"no collective {collective!r}: there are {', '.join(CANDIDATES)}")
        nbytes = whole(nbytes, "nbytes", 0)
        asked = nbytes // self._size if collective in ("all_gather", "reduce_scatter") else nbytes
        algorithm = algorithm or self.choose(collective, asked)
        return AlgorithmChoice(
            algorithm, self.predict(collective, algorithm, nbytes), self._machine.measured_here
        )

    def predict(self, collective: str, algorithm: str, nbytes: int) -> float:
        """Seconds that a call takes by the model, Python's part included; `nbytes` of the whole buffer."""
        return predict_seconds(make(collective, algorithm, self._size, 0, self._hosts), nbytes, self._machine)

    def predict_coded(
        self, collective: str, algorithm: str, nbytes: int, bytes_per_value: float, coding: str
    ) -> float:
        """As `predict`, where edges carry so many bytes in place of an f32's four."""
        hosts = self._hosts if coding == "between" else ()
        plan = make(collective, algorithm, self._size, 0, hosts, coding)
        if self._one_host:
            coded = 2 * nbytes / self._machine.copy.all_memory * CODE_COPIES
            return shared_seconds(plan, nbytes, self._machine) + coded
        return self._machine.call_s + CostCurve(plan, self._machine, bytes_per_value / 4)(nbytes)

    def direct(self, collective: str, nbytes: int) -> str:
        """The choice on one host; also where contributions have to be combined in the order of ranks."""
        if collective == "all_reduce":
            return "one_shot" if nbytes * (self._size - 1) <= ONE_SHOT_BYTES else "two_shot"
        return "direct"


def predict_seconds(plan: Plan, nbytes: int, machine: MachineCalibration = DEFAULTS) -> float:
    """Seconds that a call takes by the model, Python's part included; `nbytes` of the whole buffer."""
    if len(set(plan.hosts)) <= 1:
        return shared_seconds(plan, nbytes, machine)
    return machine.call_s + CostCurve(plan, machine)(nbytes)


def choose(collective: str, size: int, nbytes: int, hosts: tuple[int, ...] = ()) -> str:
    """The algorithm for `nbytes` per rank among `size` ranks; `hosts` is the host of each, () one host.

    Example: choose("all_reduce", 4, 64 << 20, (0, 0, 1, 1)) == "hierarchical"
    """
    return Tuner(size, hosts).choose(collective, nbytes)
