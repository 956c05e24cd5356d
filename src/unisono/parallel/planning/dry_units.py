"""The data axis of a dry run under ZeRO 1 to 3, or in low precision: what fully_shard keeps in memory.

The parameters of the model are whole here, and not counted. What a rank keeps of them, what it gathers of
them and what it reduces are charges; gradients that autograd makes count themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.parallel.graph.containers import cast, mapped, tensors_in
from unisono.parallel.sharded_parameters import TYPES
from unisono.torch_internals import find, fsdp

from .memory_account import Charge, StorageWatch, copy_in

if TYPE_CHECKING:
    from unisono.parallel.plan import Plan

__all__ = ["DryShards", "shard_of"]

REDUCING = 1  # the stream on which fully_shard reduces
GATHERING = 2  # the one on which it gathers, where nothing is gathered ahead


def shard_of(shape: Sequence[int], parts: int) -> tuple[int, ...]:
    """The part of a tensor that the first of `parts` ranks keeps; no rank keeps more. A scalar is whole.

    Example: (10, 3), 4 -> (3, 3).
    """
    return (-(-shape[0] // parts), *shape[1:]) if shape else ()


class _DryUnit:
    """Parameters that are gathered and reduced together.

    Args:
        parts: ranks that share them.    low: the type in which they compute; None: theirs.
    """

    def __init__(self, values: list[nn.Parameter], parts: int, low: torch.dtype | None) -> None:
        self.values, self.parts = values, parts
        self.kept = [math.prod(shard_of(value.shape, parts)) for value in values]
        self.dtype = low or (values[0].dtype if values else torch.float32)
        self.cast = bool(values) and self.dtype != torch.float32
        self.gathering: Charge | None = None
        self.whole: list[Charge] = []
        self.sums: dict[nn.Parameter, Tensor] = {}  # gradients of earlier micro-batches in f32
        self.forwards: list[int] = []  # places in the order of forwards, whose backward is to come
        self.reduced: Charge | None = None  # this rank's part of the gradients
        self.partial: Charge | None = None  # the same, which replicas have not added up yet
        self.began = self.ended = True

    @property
    def gathered(self) -> bool:
        return bool(self.whole)


class DryShards:
    """What fully_shard and replicate do, unit by unit: gather, compute, reduce.

    Args:
        units: modules with messages of their own.    exact: those that compute in f32.
        experts: layers whose parameters fewer ranks hold.
        fused: gradients are copied by kernels of a GPU, which is not a virtual one.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[nn.Module],
        exact: Sequence[nn.Module],
        plan: Plan,
        watch: StorageWatch,
        *,
        experts: Sequence[nn.Module],
        fused: bool,
    ) -> None:
        self.root, self.compression, self._plan, self._watch = root, None, plan, watch
        self._fused = fused
        self._parts = plan.sharers
        self._replicas = plan.copies > self._parts  # which add up what they have reduced
        self._adds_in_leaves = find(fsdp.NAMES["leaf dtypes"]) is not None
        self._reduces = self._resharding = self._last = True
        self._forward: list[_DryUnit] = []
        self._sent: Charge | None = None  # the input of the last reduction
        self._summed: list[Charge] = []  # what replicas have added up
        self._copied: Charge | None = None  # the last gathered buffer, which is kept in forward
        self._seen: set[nn.Parameter] = set()
        self._groups: list[_DryUnit] = []
        low = TYPES[plan.precision] if plan.low else None
        made = {}
        for module in exact:
            made[module] = self._wrap(module, None, out=None if module is root else low)
        for unit in (*units, root):
            inside = set(unit.modules())
            for layer in experts:
                if layer in inside and layer not in made:
                    made[layer] = self._wrap(layer, low, parts=plan.of_experts().sharers)
            out = torch.float32 if unit is root and low and plan.pipeline == 1 else None
            made[unit] = self._wrap(unit, low, out=out)
        self._root = made[root]
        self._ahead: dict[_DryUnit, _DryUnit] = {}
        self._keeps_copied = not units  # otherwise parameters are gathered ahead
        if self._parts > 1:
            self._ahead = dict(itertools.pairwise(made[unit] for unit in units))

    # ---- hooks ----

    def _wrap(
        self,
        module: nn.Module,
        low: torch.dtype | None,
        out: torch.dtype | None = None,
        parts: int | None = None,
    ) -> _DryUnit:
        """Make the unit of a module. `parts`: ranks that share a layer of experts, whose inputs stay."""
        values = [value for value in module.parameters() if value.dim() and value not in self._seen]
        self._seen.update(values)
        group = _DryUnit(values, parts or self._parts, low if module is not self.root or low else None)
        self._groups.append(group)
        into = low if self._plan.context == 1 and parts is None else None
        if low is None and self._plan.low and self._plan.context == 1:
            into = torch.float32
        module.register_forward_pre_hook(self._pre(group, into), prepend=True, with_kwargs=True)
        module.register_forward_hook(self._post(group, out))
        return group

    def _pre(self, group: _DryUnit, low: torch.dtype | None) -> Callable[..., Any]:
        def pre(_module: nn.Module, args: Any, named: Any) -> Any:
            args, named = cast((args, named), low)
            if self._watch.phase == "backward":  # computed again
                self._gather(group)
                self._unshard(group)
                return args, named
            self._gather(group)
            self._unshard(group)
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, named))):
                args, named = self._passed(group, args, named)
            if group in self._ahead:
                self._gather(self._ahead[group])
            return args, named

        return pre

    def _passed(self, group: _DryUnit, args: Any, named: Any) -> Any:
        """The inputs, through a function whose backward ends that of the group."""
        given = [t for t in tensors_in((args, named)) if t.requires_grad]
        changed = dict(
            zip(map(id, given), _End.apply(lambda: self._end(group), *given), strict=True)  # type: ignore[no-untyped-call]
        )
        return mapped((args, named), lambda tensor: changed.get(id(tensor), tensor))

    def _post(self, group: _DryUnit, out: torch.dtype | None) -> Callable[..., Any]:
        def post(_module: nn.Module, _args: Any, output: Any) -> Any:
            if self._watch.phase != "backward":
                root = group is self._root
                if self._plan.zero == 3 and not (root and self._plan.pipeline == 1):  # backward follows
                    self._reshard(group)
                if root:
                    self._free_copied()
                if group.values:  # fully_shard leaves others out, and gathers the one before
                    group.forwards.append(len(self._forward))
                    self._forward.append(group)
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda _: self._begin(group))
            return cast(output, out)

        return post

    def _begin(self, group: _DryUnit) -> None:
        """Backward comes to a group: gather it, and the one before it ahead."""
        if group.began:
            return
        group.began = True
        self._type_leaves(group)
        self._gather(group)
        self._unshard(group)
        place = group.forwards.pop() if group.forwards else 0
        if place:
            self._gather(self._forward[place - 1])

    def _end(self, group: _DryUnit) -> None:
        """Backward leaves a group."""
        group.ended = True
        if not self._reduces:
            self._accumulate(group)
            if self._resharding:
                self._reshard(group)
            return
        grads = self._taken(group)
        if self._resharding:
            self._reshard(group)
        if group.values:  # a unit without parameters reduces nothing, and waits for no reduction
            self._free_sent()
        if grads:
            self._reduce(group, grads)

    # ---- memory ----

    def _gather(self, group: _DryUnit) -> None:
        if group.gathered or group.gathering is not None or not group.values:
            return
        account, numel = self._watch.account, sum(group.kept)
        if group.parts == 1:
            group.gathering = Charge(0, "gathered", None)
            return
        stream = GATHERING if self._keeps_copied else 0
        cast = account.charge(numel * group.dtype.itemsize, "gathered", stream) if group.cast else None
        group.gathering = account.charge(numel * group.parts * group.dtype.itemsize, "gathered", stream)
        if cast is not None:
            account.release(cast)

    def _unshard(self, group: _DryUnit) -> None:
        if group.gathered or group.gathering is None:
            return
        account, size = self._watch.account, group.dtype.itemsize * group.parts
        for numel in group.kept:
            cast = account.charge(numel * size, "gathered") if group.parts == 1 and group.cast else None
            group.whole.append(account.charge(numel * size, "gathered"))
            if cast is not None:
                account.release(cast)
        gathered, group.gathering = group.gathering, None
        if self._keeps_copied and self._watch.phase == "forward":
            self._free_copied()
            self._copied = gathered
        else:
            account.release(gathered)

    def _free_copied(self) -> None:
        if self._copied is not None:
            self._watch.account.release(self._copied)
            self._copied = None

    def _reshard(self, group: _DryUnit) -> None:
        for charge in group.whole:
            self._watch.account.release(charge)
        group.whole.clear()

    def _type_leaves(self, group: _DryUnit) -> None:
        """A first gradient that is not reduced yet is f32 at once; others are as backward makes them."""
        if not self._adds_in_leaves or not group.cast or self._plan.reduce != "f32":
            return
        for value in group.values:
            if value.requires_grad:
                wide = not self._reduces and value.grad is None
                value.grad_dtype = torch.float32 if wide else None

    def _accumulate(self, group: _DryUnit) -> None:
        if not group.cast or self._plan.reduce != "f32":
            return
        with torch.no_grad(), self._watch.labelled("gradients"):
            for value in group.values:
                if value.grad is None or value.grad.dtype == torch.float32:
                    continue
                before = group.sums.get(value)
                grad, value.grad = value.grad, None
                made = grad.to(torch.float32) if before is None else before.add_(grad)
                if self._adds_in_leaves:
                    value.grad_dtype = None  # backward adds to it in place
                    value.grad = made
                else:
                    group.sums[value] = made

    def _taken(self, group: _DryUnit) -> list[Tensor]:
        """The gradients of all micro-batches so far, which no parameter holds any more."""
        found = []
        for value in group.values:
            grad, value.grad = value.grad, None
            before = group.sums.pop(value, None)
            taken = grad if before is None else before
            if taken is not None:
                found.append(taken)
        return found

    def _reduce(self, group: _DryUnit, grads: list[Tensor]) -> None:
        account = self._watch.account
        size = 4 if self._plan.reduce == "f32" or not group.cast else group.dtype.itemsize
        parts = group.parts
        numel = sum(math.prod(shard_of(grad.shape, parts)) for grad in grads)
        self._sent = account.charge(numel * parts * size, "buffers")
        dtype = group.dtype if size != 4 else torch.float32
        copies = copy_in(grads, parts, dtype, fused=self._fused)
        for copy in [account.charge(nbytes, "buffers") for nbytes in copies]:
            account.release(copy)
        grads.clear()
        made = account.charge(numel * size, "gradients", REDUCING)
        if self._replicas and not self._last:  # replicas add up what all micro-batches have reduced
            if group.partial is None:
                group.partial = made
            else:
                account.release(made)
            return
        if size != 4:
            low, made = made, account.charge(numel * 4, "gradients", REDUCING)
            if self._replicas:
                self._summed.append(low)  # kept until backward ends
            else:
                account.release(low)
        if group.partial is not None:
            account.release(group.partial)
            group.partial = None
        if group.reduced is None:
            group.reduced = made
        else:
            account.release(made)

    def _free_sent(self) -> None:
        if self._sent is not None:
            self._watch.account.release(self._sent)
            self._sent = None

    # ---- what a run asks of it ----

    def before_backward(self, *, last: bool) -> None:
        """Whether the next backward reduces, and whether parameters are freed after it."""
        self._reduces, self._resharding = last or self._plan.zero >= 2, last or self._plan.zero == 3
        self._last = last
        for group in self._groups:
            group.began = group.ended = False

    def after_backward(self) -> None:
        """The end of a backward pass: of the root, and of what nothing has ended."""
        for group in (self._root, *self._groups):
            if not group.ended:
                self._end(group)
            group.began = True
        if not self._last:
            return
        self._free_sent()
        for charge in self._summed:
            self._watch.account.release(charge)
        self._summed.clear()
        self._forward.clear()
        for group in self._groups:
            group.forwards.clear()
            if group.gathering is not None:
                self._watch.account.release(group.gathering)
                group.gathering = None

    def after_weights(self) -> None:
        """The end of a pass for gradients of weights."""
        for group in self._groups:
            self._accumulate(group)

    def reduce_now(self) -> None:
        """Reduce what has added up, where no backward does."""
        self.before_backward(last=True)
        self.after_backward()

    def reset(self) -> None:
        """Nothing is under way."""

    def finish(self) -> None:
        """The last backward has ended all."""

    def clear(self) -> None:
        """Drop the gradients."""
        for group in self._groups:
            if group.reduced is not None:
                self._watch.account.release(group.reduced)
                group.reduced = None


class _End(torch.autograd.Function):
    """Passes tensors on; its backward tells that those of the group's inputs are known."""

    @staticmethod
    def forward(ctx: Any, ended: Callable[[], None], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.ended = ended
        return given

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.ended()
        return None, *grads
