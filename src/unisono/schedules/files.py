"""The plan in a file, by the file's suffix."""

from __future__ import annotations

from pathlib import Path

from unisono.errors import PlanError
from unisono.plans.plan import Plan

__all__ = ["is_file", "load"]

SUFFIXES = (".xml",)


def is_file(algorithm: str) -> bool:
    """Whether the name of an algorithm is that of a file: it has a dot or a slash."""
    return "." in algorithm or "/" in algorithm


def load(
    file: str | Path,
    collective: str = "",
    size: int = 0,
    root: int | None = None,
    hosts: tuple[int, ...] = (),
) -> Plan:
    """The plan in a file; it is not proved yet. Its algorithm is the file's name.

    Args:
        collective, size, root: what the caller wants; "", 0, None: what the file has.
        hosts: of each rank.
    Raises:
        OSError: the file cannot be read.
        ValueError: it is wrong, or of another collective, size or root; the message names the file.
        PlanError: it deadlocks, or does what a plan cannot; the message names the rank and the step.
    """
    file = Path(file)
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file}: expected a name that ends in {' or '.join(SUFFIXES)}")
    from unisono.schedules.msccl import read_algorithm
    from unisono.schedules.translation import plan_of

    algorithm = read_algorithm(file)
    found = algorithm.collective or collective
    if collective and found != collective:
        raise PlanError(f"{file}: is a schedule of {found}, expected {collective}")
    if size and algorithm.size != size:
        raise PlanError(f"{file}: is a schedule of {algorithm.size} ranks, expected {size}")
    if root is not None and algorithm.root != root:
        raise PlanError(f"{file}: is a schedule with root {algorithm.root}, expected {root}")
    plan = plan_of(algorithm._replace(collective=found, name=file.name))
    return plan._replace(hosts=hosts)
