"""Copies of models. Functions that a model keeps, such as lambdas and hooks, refer to the copy's modules.

copy.deepcopy takes a function as it is: what its closure refers to is the model that was copied.
"""

from __future__ import annotations

import copy
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

__all__ = ["model_copy"]


def model_copy(model: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy of a model, or of a tuple of models and modules of theirs.

    Args:
        memo: id of an object -> what the copy has in its place, as for copy.deepcopy.
    """
    known: dict[int, Any] = {} if memo is None else memo
    made = copy.deepcopy(model, known)
    functions = _CopiedFunctions(known)
    for part in made if isinstance(made, tuple) else (made,):
        for module in part.modules() if isinstance(part, nn.Module) else ():
            functions.move_in(vars(module))
            for table in filter(lambda held: isinstance(held, dict), vars(module).values()):
                functions.move_in(table)  # such as that of hooks, to which their handles refer
    return made


class _CopiedFunctions:
    """Functions for the copy. memo: id of a module -> its copy."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._made: dict[int, FunctionType] = {}
        self._open: set[int] = set()  # containers that are walked now: one may hold itself

    def move_in(self, table: dict[Any, Any]) -> None:
        """Change the functions of a table that belongs to the copy."""
        for key, value in table.items():
            table[key] = self.moved(value)

    def moved(self, thing: Any) -> Any:
        """`thing` with copies in place of the modules that it refers to; itself where it has none."""
        if isinstance(thing, nn.Module):
            return self._memo.get(id(thing), thing)
        if isinstance(thing, MethodType):
            owner = self.moved(thing.__self__)
            return thing if owner is thing.__self__ else MethodType(thing.__func__, owner)
        if isinstance(thing, FunctionType):
            return self._function(thing)
        if type(thing) not in (list, tuple, dict) or id(thing) in self._open:
            return thing
        self._open.add(id(thing))
        old = [*(thing.values() if isinstance(thing, dict) else thing)]
        new = [self.moved(part) for part in old]
        self._open.remove(id(thing))
        if all(one is other for one, other in zip(new, old, strict=True)):
            return thing
        return type(thing)(zip(thing, new, strict=True) if isinstance(thing, dict) else new)

    def _function(self, function: FunctionType) -> FunctionType:
        if id(function) in self._made:
            return self._made[id(function)]
        cells = tuple(CellType() for _ in function.__closure__ or ())
        made = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells or None
        )
        self._made[id(function)] = made  # it may refer to itself
        made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, {**function.__dict__}
        made.__qualname__, made.__module__, made.__doc__ = (
            function.__qualname__, function.__module__, function.__doc__
        )  # fmt: skip
        made.__defaults__ = self.moved(function.__defaults__)
        changed = made.__defaults__ is not function.__defaults__
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            try:
                held = old.cell_contents
            except ValueError:  # an empty cell
                continue
            cell.cell_contents = self.moved(held)
            changed |= cell.cell_contents is not held and cell.cell_contents is not made
        if not changed:
            self._made[id(function)] = function
        return self._made[id(function)]
