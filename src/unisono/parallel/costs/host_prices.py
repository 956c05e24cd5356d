"""What operators and collectives take for a job on some hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from unisono.errors import UnfitError

from .collectives import CollectiveCosts, LinkCosts, RankGroups
from .operator_prices import OperatorPrices

if TYPE_CHECKING:
    from unisono.engine.costs.machine import MachineCalibration
    from unisono.parallel.plan import Plan
    from unisono.planner.compute_calibration import ComputeCalibration, SharedSteps
    from unisono.planner.hardware import Hardware

    from .collectives import Collectives
    from .trace import TracedOperator
    from .trial import ModelTrial

__all__ = ["HostPrices", "HostPricing", "links_of", "source_of", "swap_rate"]


class HostPrices(NamedTuple):
    """What a job on some hosts pays.

    Args:
        collectives, reductions: see `StepParts`.
        crowd: ranks of a host per core.  shared: more, where they train together.
        groups: which group of an axis a step waits for.
    """

    collectives: Collectives
    reductions: Collectives
    operators: OperatorPrices
    crowd: float
    shared: SharedSteps
    groups: RankGroups


class HostPricing:
    """Prices of the jobs that one predictor is asked about; each is made once.

    Args:
        hardware: of each host, whose links count in place of `machine`'s.
        own_device: each rank computes on a device of its own.
        trial: of the model, if it is tried.  trace: the operators of a step of so many rows.
    """

    def __init__(
        self, compute: ComputeCalibration, machine: MachineCalibration, hardware: Sequence[Hardware],
        own_device: bool, trial: ModelTrial | None, trace: Callable[[int], Sequence[TracedOperator]],
    ) -> None:  # fmt: skip
        self._compute, self._machine, self._hardware = compute, machine, hardware
        self._own_device = own_device
        self._trial, self._trace = trial, trace
        self._known: dict[tuple[tuple[int, ...], str], HostPrices] = {}
        self._overheads: dict[int, dict[str, float]] = {}

    def of(self, hosts: tuple[int, ...], plan: Plan, *, cut: bool) -> HostPrices:
        """Prices on such hosts, under a plan that may have ranks wait for each other within a step.

        Args:
            cut: the tensor axis cuts some module, so that its ranks wait.
        """
        kind = "cut_scale" if cut else "stage_scale" if plan.pipeline > 1 else "scale"
        if (hosts, kind) not in self._known:
            here = 1 if self._own_device else max(map(hosts.count, hosts))
            costs, factor, crowd = self._compute.of(here)
            shared = self._compute.together(here)
            collectives, reductions = (
                LinkCosts(self._hardware, hosts)
                if self._hardware
                else CollectiveCosts(self._machine, hosts, turn_s)
                for turn_s in (shared.turn_s, 0.0)
            )
            operators = OperatorPrices(costs, factor * getattr(shared, kind), self._overhead(here))
            groups = RankGroups(hosts, reductions, [id(each) for each in self._hardware])
            self._known[hosts, kind] = HostPrices(collectives, reductions, operators, crowd, shared, groups)
        return self._known[hosts, kind]

    def _overhead(self, here: int) -> dict[str, float]:
        """What the model's own Python adds to an operator, by phase, with so many ranks on a host."""
        if self._trial is None:
            return {}
        threads = max(1, self._compute.cores // here)
        if threads not in self._overheads:
            costs, factor, _ = self._compute.of(here)
            self._overheads[threads] = self._trial.overhead(
                self._trace, OperatorPrices(costs, factor), threads
            )
        return self._overheads[threads]


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
