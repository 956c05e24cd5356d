"""Follows parameters that are frozen or unfrozen between calls: their `requires_grad`, the same on all ranks.

A rank that trains what another one has frozen would wait for it in another collective. So each call tells
all ranks, in the message with the rows of its batch, whether something has changed. Only then the ranks
compare names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from unisono.torch.control_data import on_every_rank
from unisono.torch_internals import fsdp

from .fused_names import fused_layers
from .sharded_parameters import ShardedParameters
from .swap import ParameterSwap

if TYPE_CHECKING:
    from .mesh import PlanMesh
    from .model_setup import ModelSetup

__all__ = ["TrainedFlags", "why_fixed"]


def why_fixed(built: ModelSetup) -> str:
    """Why a run does not follow what is frozen and unfrozen; empty: it does."""
    plan, cut = built.mesh.everyone.plan, built.decision
    for name in ("swap", "elastic", "local_steps", "compression"):
        if getattr(plan, name):
            return f"Plan({name}={getattr(plan, name)!r}) does not follow"
    if isinstance(built.units, ShardedParameters) and not fsdp.can_follow_frozen():
        return "Units of this PyTorch do not follow"
    if built.experts is not None:
        return f"Plan(expert={plan.expert}) with layers of experts does not follow"
    if cut is not None and not cut.of_all:
        return (
            f"tensor={plan.tensor} is cut for what was trained then. With parallelize(..., sample=inputs "
            "of a batch), most models are cut for all parameters"
        )
    return ""


class TrainedFlags:
    """Which parameters of this rank are trained.

    Attributes:
        everywhere: name -> whether it is trained, of the parameters of all ranks, as `agreed` has found it.
            A layer for which others stand is trained if one of them is.
    """

    def __init__(self, built: ModelSetup) -> None:
        self._named, self._units = built.named, built.units
        self._flags = {name: value.requires_grad for name, value in self._named.items()}
        self._fused = {
            f"{layer.path}.{leaf}": layer.parts(leaf)
            for layer in fused_layers(built.model)
            for leaf in layer.leaves
        }
        self.everywhere: dict[str, bool] = {}
        everywhere = built.model.named_parameters(remove_duplicate=False)
        self._stand_ins = [  # at the path of a tied parameter in another stage
            (self._named[built.names[path]], other)
            for path, other in everywhere
            if other.is_meta and built.names[path] in self._named
        ]

    def _shown(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield (parameter, another tensor by which the model shows it)."""
        assert not isinstance(self._units, ParameterSwap)
        yield from self._units.shown()
        yield from self._stand_ins

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
        told = on_every_rank(lambda: (self._flags | mine, bool(mine), problem), mesh.world)
        first: dict[str, tuple[int, bool]] = {}
        for rank, (flags, _, other_problem) in enumerate(told):
            if other_problem:
                raise ValueError(f"rank {rank}: {other_problem}")
            for name, flag in flags.items():
                other, before = first.setdefault(name, (rank, flag))
                if flag != before:
                    words = {True: "trained", False: "frozen"}
                    raise ValueError(
                        f"{name!r} is {words[before]} on rank {other} and {words[flag]} on rank {rank}: "
                        "freeze and unfreeze on all ranks before the same step"
                    )
        found = {name: flag for name, (_, flag) in first.items()}
        fused = {whole: any(found.get(part, False) for part in parts) for whole, parts in self._fused.items()}
        self.everywhere = found | fused
        return any(changed for _, changed, _ in told)

    def take(self, changed: Mapping[str, bool]) -> None:
        """Have these flags from now on, also for what the model shows in place of a parameter."""
        flags = {self._named[name]: flag for name, flag in changed.items()}
        shown = [(other, flags[value]) for value, other in self._shown() if value in flags]
        for one, flag in [*flags.items(), *shown]:
            one.requires_grad_(flag)
            one.grad = None
        self._flags |= changed
