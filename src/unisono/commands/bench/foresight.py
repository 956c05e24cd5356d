"""`--network`: the simulator's prediction beside each measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from unisono.commands.bench.cases import OPERATIONS
from unisono.commands.bench.measure import Line
from unisono.errors import UnisonoError

if TYPE_CHECKING:
    from unisono.networks import Network

__all__ = ["network_for", "predicted", "remark"]

FAR = 0.25
"""A prediction that is further off than this share of the measured time is mentioned."""


def network_for(name: str, ranks: int) -> Network | None:
    """The network on which to simulate; "": none.

    Raises:
        ValueError: it is wrong, or has fewer ranks.
    """
    if not name:
        return None
    from unisono.networks import find

    try:
        network = find(name, ranks)
    except OSError as error:
        raise ValueError(f"--network {name}: {error.strerror}") from None
    if network.size < ranks:
        raise ValueError(f"--network {name}: has {network.size} ranks, -n asks for {ranks}")
    return network.first(ranks)


def predicted(lines: Sequence[Line], network: Network | None) -> Iterator[Line]:
    """The lines with the simulator's prediction, where the operation has a plan."""
    from unisono.simulation import simulate

    for line in lines:
        if network is None or not line.algorithm:
            yield line
            continue
        collective = OPERATIONS[line.case.operation].even
        case = line.case
        try:
            found = simulate(
                collective, network, algorithm=line.algorithm, nbytes=case.nbytes, root=case.root
            )
        except UnisonoError:
            yield replace(line, predicted_us=None)
        else:
            yield replace(line, predicted_us=found.seconds * 1e6)


def remark(lines: Sequence[Line], network: Network | None) -> str:
    """How many predictions are far off; "" without a network."""
    told = [line for line in lines if line.predicted_us is not None]
    if network is None or not told:
        return ""
    far = sum(abs(line.predicted_us / line.own.p50_us - 1) > FAR for line in told if line.predicted_us)
    return f"# predicted by the simulator on {network.name}: {far} of {len(told)} are off by more than 25 %"
