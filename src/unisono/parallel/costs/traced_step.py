"""What a trace of a step consists of: operators, collectives of the tensor axis, attention, module calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from .operator_kinds import OperatorPoint

if TYPE_CHECKING:
    from unisono.parallel.graph.cut import Cut

__all__ = [
    "NO_UNIT",
    "ModuleCall",
    "StepLayout",
    "TracedAttention",
    "TracedMove",
    "TracedOperator",
    "TracedStep",
]

NO_UNIT = ""


class TracedOperator(NamedTuple):
    """One operator.

    Attributes:
        phase: forward, backward or update.
        call: number of the module call that has begun last in forward; -1: none had.
        unit: the path of its unit; "": of none.
        followed: autograd runs it, or has made a function for it.
    """

    size: OperatorPoint
    phase: str
    call: int
    unit: str
    followed: bool


class TracedMove(NamedTuple):
    """One collective of the tensor axis.

    Attributes:
        nbytes: of the whole buffer, the larger end.
        phase: forward, backward, or regather: in backward, of what a layer got from all ranks and dropped.
        call, unit: as of an operator.
    """

    collective: str
    nbytes: int
    phase: str
    call: int
    unit: str


class TracedAttention(NamedTuple):
    """One attention in forward, over all positions.

    Attributes:
        queries: bytes of the queries.  keys: of keys and values together.
        heads: the largest number that divides those of the queries and those of the keys.
        width: bytes of an element.  call: as of an operator.
    """

    queries: int
    keys: int
    heads: int
    width: int
    call: int


class ModuleCall(NamedTuple):
    """A call of a module in forward: its path, which call of it from 0, and the bytes of its tensors."""

    path: str
    number: int
    nbytes: int


@dataclass(frozen=True)
class StepLayout:
    """How a model is cut.

    Attributes:
        units: paths of modules whose parameters are gathered and reduced together.
        cut: how the tensor axis cuts it; None: not.
        dtype: in which it computes; None: in that of its parameters.
    """

    units: tuple[str, ...] = ()
    cut: Cut | None = None
    dtype: torch.dtype | None = None


@dataclass
class TracedStep:
    """What one micro-batch runs on shapes, on one data rank, over all stages.

    Attributes:
        calls: of modules, in the order in which they begin.
        homes: name of a parameter -> the call and the unit in which its module is called first.
        model: the copy without values, cut; its parameters have gradients.
    """

    model: nn.Module
    operators: list[TracedOperator] = field(default_factory=list)
    moves: list[TracedMove] = field(default_factory=list)
    attentions: list[TracedAttention] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    homes: dict[str, tuple[int, str]] = field(default_factory=dict)
