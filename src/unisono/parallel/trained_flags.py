"""Follows parameters that are frozen or unfrozen between calls: their `requires_grad`, the same on all ranks.

A rank that trains what another one has frozen would wait for it in another collective. So each call tells
all ranks, in the message with the rows of its batch, whether something has changed. Only then the ranks
compare names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from .mesh import PlanMesh
    from .model_setup import Parameters

__all__ = ["TrainedFlags", "check_groups", "extend_optimizers"]


class TrainedFlags:
    """Which parameters of this rank are trained.

    Args:
        named: this rank's parameters, as the optimizer has them.
        shown: pairs (parameter, what the model shows in its place, at present or at another path).
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        shown: Callable[[], Iterable[tuple[nn.Parameter, nn.Parameter]]],
    ) -> None:
        self._named, self._shown = named, shown
        self._flags = {name: value.requires_grad for name, value in named.items()}

    def changed(self) -> dict[str, bool]:
        """Name -> whether it is trained now, of each parameter that the caller has frozen or unfrozen."""
        others = {value for value, other in self._shown() if other.requires_grad != value.requires_grad}
        return {
            name: not was
            for name, was in self._flags.items()
            if self._named[name].requires_grad != was or self._named[name] in others
        }

    def agreed(self, mesh: PlanMesh, problem: str = "") -> bool:
        """Compare the changes of all ranks; return whether there are any. All ranks call this.

        Args:
            problem: why this rank cannot follow.
        Raises:
            ValueError: a rank cannot follow, or ranks differ about a parameter that both have.
        """
        mine = self.changed()
        told: list[Any] = [None] * mesh.plan.ranks
        dist.all_gather_object(told, (self._flags | mine, bool(mine), problem), group=mesh.world)
        first: dict[str, tuple[int, bool]] = {}
        for rank, (flags, _, problem) in enumerate(told):
            if problem:
                raise ValueError(f"rank {rank}: {problem}")
            for name, flag in flags.items():
                other, before = first.setdefault(name, (rank, flag))
                if flag != before:
                    words = {True: "trained", False: "frozen"}
                    raise ValueError(
                        f"{name!r} is {words[before]} on rank {other} and {words[flag]} on rank {rank}: "
                        "freeze and unfreeze on all ranks before the same step"
                    )
        return any(changed for _, changed, _ in told)

    def take(self, changed: Mapping[str, bool]) -> None:
        """Have these flags from now on, also for what the model shows in place of a parameter."""
        flags = {self._named[name]: flag for name, flag in changed.items()}
        shown = [(other, flags[value]) for value, other in self._shown() if value in flags]
        for one, flag in [*flags.items(), *shown]:
            one.requires_grad_(flag)
            one.grad = None
        self._flags |= changed


def check_groups(
    optimizers: Sequence[torch.optim.Optimizer], made: Sequence[torch.optim.Optimizer], new: Parameters
) -> None:
    """Raise ValueError where `extend_optimizers` would not know the group of a parameter.

    Args:
        made: what the caller's function makes of the new parameters alone; empty: there are none.
    """
    here, there = ([len(one.param_groups) for one in some] for some in (optimizers, made))
    if made and here != there:
        raise ValueError(
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
