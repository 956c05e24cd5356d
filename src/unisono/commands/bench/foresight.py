"""The prediction beside each measurement: by the simulator with `--network`, otherwise by the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from unisono.commands.bench.cases import OPERATIONS
from unisono.commands.bench.measure import CaseResult
from unisono.engine.costs.forecasts import PredictedCase, keep, summary, text
from unisono.engine.environment import env
from unisono.errors import UnisonoError

if TYPE_CHECKING:
    from unisono.networks import Network

__all__ = ["network_for", "predicted", "remark"]


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


def predicted(lines: Sequence[CaseResult], network: Network | None) -> Iterator[CaseResult]:
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


def remark(lines: Sequence[CaseResult], network: Network | None) -> str:
    """How many predictions are far off, which `unisono doctor` then shows, too; "" without any prediction."""
    by = "the cost model" if network is None else f"the simulator on {network.name}"
    cases = [
        PredictedCase(
            f"{line.case.operation}/{line.algorithm} of {line.case.nbytes} B on {line.case.ranks} ranks",
            line.own.p50_us,
            line.predicted_us,
        )
        for line in lines
        if line.predicted_us and line.own.p50_us
    ]
    errors = summary(cases, by)
    if errors is None:
        return ""
    keep(errors, env.read(strict=False))
    return f"# {text(errors)}"
