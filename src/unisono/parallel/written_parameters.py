"""Refuses a forward that writes parameters where a plan would lose what it writes, or write otherwise.

One process keeps what a forward writes: a clamp, rows that nn.Embedding(max_norm=) normalises, a teacher that
follows its student. Under a plan

- gathered parameters are copies, which the next gather overwrites;
- a step of several micro-batches, or with recomputation, writes several times;
- data ranks may write what follows from their own rows, and then differ.

The first steps are watched, by sums of the bits of each parameter: a training does not change later in kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from unisono.torch_internals import fsdp

from .gradients import bits_of, local, same_bits
from .replicated_parameters import ReplicatedParameters
from .sharded_parameters import ShardedParameters
from .swap import ParameterSwap

if TYPE_CHECKING:
    from .model_setup import ModelSetup

__all__ = ["WrittenParameters"]

STEPS, FORWARDS = 3, 8  # of a run, that are watched
Sums = dict[str, int]
REMEDY = (
    "Write no parameter in the forward: compute what it needs from the parameter (as "
    "torch.nn.utils.parametrize does), or write between two steps"
)


class WrittenParameters:
    """Watches the parameters of one rank in its first steps."""

    def __init__(self, built: ModelSetup) -> None:
        self._built = built
        self._left = 0 if built.mesh.plan.elastic else STEPS  # which newcomers would count anew
        self._replicas = isinstance(built.units, ReplicatedParameters)
        self._before: Sums = {}  # when a step began
        self._first: Sums = {}  # after its first forward
        self._now: Sums = {}
        self._lost: str | None = None  # a parameter whose copy was written
        self._hooks: list[Any] = []
        if isinstance(built.units, ShardedParameters):
            self._hooks = fsdp.before_freed(built.units.root, self._compare)
        elif isinstance(built.units, ParameterSwap):
            built.units.watched = FORWARDS
        else:
            self._hooks = [built.units.root.register_forward_hook(self._note)]

    def __deepcopy__(self, _memo: dict[int, Any]) -> WrittenParameters:
        """A copy of the model, such as one that is recorded, is not watched."""
        made = object.__new__(WrittenParameters)
        made._before, made._hooks = {}, []
        return made

    def begin(self) -> None:
        """A step begins."""
        self._lost, self._first = None, {}
        self._before = self._sums() if self._replicas and self._left else {}

    def written(self, forwards: int) -> tuple[bool, str]:
        """Whether the forwards of this step have written parameters, and why that is wrong; "": it is not.

        Args:
            forwards: how often the step has run the forward.
        """
        if self._lost is not None:
            return True, (
                f'the forward writes the parameter "{self._lost}", and this plan would lose it: '
                f"what computes is a copy. {REMEDY}"
            )
        if not self._before:
            return False, ""
        self._now = self._sums()
        again = next((name for name in self._now if self._now[name] != self._first.get(name)), None)
        changed = self._now != self._before
        if changed and again is not None and forwards > 1:
            return True, (
                f'the forward writes the parameter "{again}", and this step runs it {forwards} times, '
                f"where one process runs it once. {REMEDY}"
            )
        return changed, ""

    def end(self) -> None:
        """A step ends."""
        self._left -= bool(self._left)
        if not self._left:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def check_ranks(self) -> None:
        """Compare what the data ranks have written. All ranks call this, once one of them has.

        Raises:
            RuntimeError: they differ.
        """
        mesh, names = self._built.mesh, [*self._now]
        if mesh.plan.copies == 1 or mesh.plan.expert > 1 or not self._replicas or not self._left or not names:
            return
        sums = torch.tensor([*self._now.values()], device=mesh.axes.device_type)
        most, least = sums.clone(), sums.clone()
        with record_function("up::agree|written parameters"):
            for group in (mesh.group("replica"), mesh.group("shard")):
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
                dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        for name, differs in zip(names, (most != least).tolist(), strict=True):
            if differs:
                raise RuntimeError(
                    f'the forward writes the parameter "{name}", and data ranks write different values: '
                    f"each has its own rows. {REMEDY}"
                )

    def _compare(self, sharded: nn.Parameter, gathered: Tensor, part: int, parts: int, dim: int) -> None:
        """Compare this rank's part of a gathered parameter with what the optimizer has."""
        whole, mine = local(gathered.detach()), local(sharded.detach())
        chunks = torch.chunk(whole, parts, dim)
        here = chunks[part] if part < len(chunks) else whole.narrow(dim, 0, 0)
        if here.shape != mine.shape or not same_bits(here, mine.to(here.dtype)):
            named = self._built.named.items()
            self._lost = next((name for name, value in named if value is gathered or value is sharded), "")

    def _note(self, *_: Any) -> None:
        """A forward has ended."""
        if self._before and not self._first:
            self._first = self._sums()

    @torch.no_grad()
    def _sums(self) -> Sums:
        """The sum of each parameter's bits, by name."""
        named = self._built.named.items()
        sums = [bits_of(local(value)).sum(dtype=torch.int64) for _, value in named]
        values = torch.stack(sums).tolist() if sums else []
        return dict(zip((name for name, _ in named), values, strict=True))
