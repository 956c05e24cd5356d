"""The plan in a file, by the file's suffix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.errors import PlanError
from unisono.plans.plan import Plan, Step

if TYPE_CHECKING:
    from pathlib import Path

    from unisono.schedules.actions import TraceAction

__all__ = ["is_file", "load", "read_actions", "save", "steps_in"]

SUFFIXES = (".xml", ".goal", ".et", ".json", ".toml")


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
    from pathlib import Path  # every rank imports this module, and few read a file

    file = Path(file)
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file}: expected a name that ends in {' or '.join(SUFFIXES)}")
    if file.suffix in (".goal", ".et"):
        from unisono.schedules.actions import plan_of_actions

        plan = plan_of_actions(str(file), read_actions(file))
        _check(file, (plan.collective, plan.size, plan.root), (collective, size, root))
        return plan._replace(algorithm=file.name, hosts=hosts)
    if file.suffix == ".json":
        from unisono.schedules.teccl import read_teccl

        plan = read_teccl(file)
        _check(file, (plan.collective, plan.size, 0), (collective, size, root))
        return plan._replace(hosts=hosts)
    if file.suffix == ".toml":
        from unisono.schedules.recipe import plan_of_recipe, read_recipe

        recipe = read_recipe(file)
        _check(file, (recipe.collective, recipe.ranks, recipe.root), (collective, size, root))
        return plan_of_recipe(recipe)
    from unisono.schedules.msccl import read_algorithm
    from unisono.schedules.translation import plan_of

    algorithm = read_algorithm(file)
    found = algorithm.collective or collective
    _check(file, (found, algorithm.size, algorithm.root), (collective, size, root))
    return plan_of(algorithm._replace(collective=found, name=file.name))._replace(hosts=hosts)


class PlannedSteps:
    """The steps of a plan as a function (rank, size, root) -> steps. parts: see `Plan`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.parts = plan.parts
        self.__name__ = plan.algorithm

    def __call__(self, rank: int, size: int, root: int) -> tuple[Step, ...]:  # noqa: ARG002
        """The steps of a rank."""
        return self._plan.steps[rank]


def steps_in(file: str | Path, collective: str, size: int, root: int) -> PlannedSteps:
    """The steps of the plan in a file, proved.

    Raises:
        OSError: the file cannot be read.  ValueError: it is wrong; see `load`.
    """
    from unisono.plans.proof import prove

    plan = load(file, collective, size, root)
    prove(plan)
    return PlannedSteps(plan)


def read_actions(file: str | Path) -> list[list[TraceAction]]:
    """What each rank does, from a .goal file, or from the .et files of all ranks; `file` is that of rank 0.

    Raises:
        OSError: a file cannot be read.  ValueError: it is wrong; the message names the file and the place.
    """
    if str(file).endswith(".goal"):
        from unisono.schedules.goal import read_goal

        return read_goal(file)
    from unisono.schedules.chakra import read_chakra

    return read_chakra(file)


def save(plan: Plan, file: str | Path, nbytes: int = 1 << 20) -> None:
    """Write a plan as MSCCL's XML, GOAL or Chakra, by the suffix of the file; .0.et: a file for each rank.

    Args:
        nbytes: of the whole buffer, for the formats that name bytes.
    Raises:
        OSError: a file cannot be written.  ValueError: another suffix, or the format cannot say it.
    """
    from pathlib import Path  # every rank imports this module, and few read a file

    file = Path(file)
    if file.suffix == ".xml":
        from unisono.schedules.msccl_writer import msccl

        file.write_text(msccl(plan), encoding="utf-8")
    elif file.suffix == ".goal":
        from unisono.schedules.goal import goal

        file.write_text(goal(plan, nbytes), encoding="ascii")
    elif file.name.endswith(".0.et"):
        from unisono.schedules.chakra import chakra

        for rank, data in enumerate(chakra(plan, nbytes)):
            file.with_name(f"{file.name.removesuffix('.0.et')}.{rank}.et").write_bytes(data)
    else:
        raise ValueError(f"{file}: expected a name that ends in .xml, .goal or .0.et")


def _check(file: Path, found: tuple[str, int, int], wanted: tuple[str, int, int | None]) -> None:
    """Compare collective, size and root with what the caller wants."""
    if wanted[0] and found[0] != wanted[0]:
        raise PlanError(f"{file}: is a schedule of {found[0]}, expected {wanted[0]}")
    if wanted[1] and found[1] != wanted[1]:
        raise PlanError(f"{file}: is a schedule of {found[1]} ranks, expected {wanted[1]}")
    if wanted[2] is not None and found[2] != wanted[2]:
        raise PlanError(f"{file}: is a schedule with root {found[2]}, expected {wanted[2]}")
