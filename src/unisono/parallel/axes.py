"""The axes of the mesh, and what the ranks of each have in common."""

from typing import NamedTuple


class PlanAxis(NamedTuple):
    """One axis of the mesh, a field of `Plan`.

    Attributes:
        splits: what its ranks share out.
        copies: they hold the same parameters, over which `zero` and the mean of gradients go.
        draws: each draws numbers of its own, such as those of dropout.
    """

    name: str
    splits: str
    copies: bool
    draws: bool


AXES = (
    PlanAxis("pipeline", "layers", copies=False, draws=True),
    PlanAxis("data", "rows", copies=True, draws=True),
    PlanAxis("context", "positions", copies=True, draws=False),
    PlanAxis("tensor", "matrices", copies=False, draws=False),
)
"""The axes in the order of ranks, the slowest first. The mesh, who has which rows, whose loss counts and who
draws what follow from it. Experts are on the axes that hold copies."""

NAMES = tuple(axis.name for axis in AXES)
