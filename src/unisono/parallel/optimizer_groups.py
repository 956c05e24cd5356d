"""The optimizers of a run: what the caller's function gets and makes, at first and of later parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unisono.errors import UnfitError
from unisono.torch.control_data import on_every_rank

from .optimizer_scope import OptimizerScope, ScopeLimits, refuse_closure, takes_closure

__all__ = ["Optimizer", "Parameters", "check_groups", "extend_optimizers", "make_optimizers", "optimizers_of"]


class Parameters(list[nn.Parameter]):
    """The parameters of this rank that are trained, as a list; `named` has them by their names in the model.

    Where a rank trains nothing, an empty tensor without a name stands for them, so that schedulers find an
    optimizer there, too.

    Example of groups: lambda p: AdamW([{"params": [v for k, v in p.named.items() if "bias" in k]}, ...])
    """

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        self.named = named or {"": nn.Parameter(torch.empty(0))}
        super().__init__(self.named.values())

    @property
    def nothing(self) -> bool:
        """Whether this rank trains nothing."""
        return "" in self.named


Optimizer = Callable[[Parameters], torch.optim.Optimizer]


def make_optimizers(
    make: Optimizer, given: Parameters, group: dist.ProcessGroup, limits: ScopeLimits
) -> tuple[Any, list[torch.optim.Optimizer]]:
    """What the caller's function makes, and the optimizers in it. All ranks of the group call this.

    Raises:
        ValueError, TypeError: they are none, or step otherwise than in one process, also where that is so on
            another rank only.
    """
    found: Any = None
    problem: Exception | None = None
    scopes: list[OptimizerScope] = []
    try:
        made = _made(make, given)
        found = made, optimizers_of(made, given, swap=limits.units)
        scopes = [limits.scope_of(one) for one in found[1]]
    except Exception as error:  # noqa: BLE001 (the other ranks have to know)
        problem = error
    mine = None if problem is None else f"{type(problem).__name__}: {problem}"
    told = on_every_rank(lambda: [mine, [[*one] for one in scopes]], group)
    if problem is not None:
        raise problem
    for place, (other, _) in enumerate(told):
        if other is not None:  # that rank does not go on, so this one must not wait for it
            rank = dist.get_global_rank(group, place)
            raise UnfitError(f"parallelize: optimizer= raised on rank {rank}: {other}")
    everywhere: Any = zip(found[1], *(theirs for _, theirs in told), strict=False)
    for one, *several in everywhere:
        limits.check(
            one, functools.reduce(OptimizerScope.joined, (OptimizerScope(*each) for each in several))
        )
    return found  # type: ignore[no-any-return]


def _made(make: Optimizer, given: Parameters) -> Any:
    try:
        return make(given)
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise UnfitError(
            f"parallelize: an optimizer got no parameter on rank {dist.get_rank()}, which trains "
            f"{', '.join([*given.named][:3])}{', ...' if len(given) > 3 else ''}. Give each optimizer a "
            'group, which may be empty on some ranks: SGD([{"params": [...]}])'
        ) from error


def optimizers_of(made: Any, given: Parameters, *, swap: bool) -> list[torch.optim.Optimizer]:
    """The optimizers that the caller's function made: one, or a list of several.

    Args:
        made: what it returned.
        given: what it was given; the tensor that stands for no parameters leaves the groups.
        swap: parameters are swapped, and one optimizer has all of them.
    Raises:
        TypeError: it is something else.
        ValueError: an optimizer has something else, such as the parameters before they were cut, or two of
            them have the same.
    """
    found = [*made] if isinstance(made, (list, tuple)) else [made]
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(
                f"parallelize: optimizer returned a {type(one).__name__}, expected torch.optim.Optimizer"
            )
        if isinstance(one, torch.optim.SparseAdam):
            raise UnfitError(
                "parallelize: optimizer returned a SparseAdam, and gradients that ranks sum up are dense. "
                "Use Adam"
            )
        if takes_closure(one):
            refuse_closure(one)
    if not found or (swap and len(found) > 1):
        raise UnfitError(
            f"parallelize: optimizer returned {len(found)} optimizers, expected "
            f"one{'' if swap else ' or more'}"
        )
    has = [p for one in found for group in one.param_groups for p in group["params"]]
    if len(set(has)) < len(has):
        raise UnfitError("parallelize: two optimizers have the same parameter, which each would change")
    known = set(given)
    foreign = sum(p not in known for p in has)
    if foreign:
        raise UnfitError(
            f"parallelize: {foreign} parameters of the optimizer are not among those that this rank trains; "
            "make it of the list that the function gets"
        )
    for group in (group for one in found for group in one.param_groups if given.nothing):
        group["params"].clear()
    return found


def check_groups(
    optimizers: Sequence[torch.optim.Optimizer], made: Sequence[torch.optim.Optimizer], new: Parameters
) -> None:
    """Raise ValueError where `extend_optimizers` would not know the group of a parameter.

    Args:
        made: what the caller's function makes of the new parameters alone; empty: there are none.
    """
    here, there = ([len(one.param_groups) for one in some] for some in (optimizers, made))
    if made and here != there:
        raise UnfitError(
            f"{next(iter(new.named))!r} is trained from now on, and nothing says in which group: optimizer= "
            f"made optimizers of {here} groups, and makes {there} of the {len(new)} new ones alone. Let it "
            "make the same groups, even empty ones; or write before this step "
            'run.optimizer.add_param_group({"params": [...]}), with parameters of run.parameters'
        )


def extend_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], made: Sequence[torch.optim.Optimizer]
) -> None:
    """Give the parameters of other optimizers to those of a run, group by group: they follow its schedule."""
    for optimizer, other in zip(optimizers, made, strict=bool(made)):
        for group, more in zip(optimizer.param_groups, other.param_groups, strict=True):
            group["params"] += more["params"]
