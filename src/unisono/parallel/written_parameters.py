"""Refuses what a program does to parameters where a plan would lose it, or do otherwise than one process.

One process keeps what a forward writes: a clamp, rows that nn.Embedding(max_norm=) normalises, a teacher that
follows its student. It keeps what is assigned between steps, too. Under a plan

- gathered parameters are copies, which the next gather overwrites;
- `p.data = t` changes the wrapper of a parameter of which this rank has a part;
- another Parameter in the place of one is not what the plan shares and the optimizer has;
- a step of several micro-batches, or with recomputation, writes several times;
- data ranks may write what follows from their own rows, and then differ.

Version counters tell of a write. Where ranks have whole parameters, a write by `.data` has no counter: sums
of the bits of each parameter show it in the first steps.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed.tensor import DTensor

from unisono.torch_internals.assignments import WrappedTensors
from unisono.torch_internals.fsdp import GatheredCopies
from unisono.torch_internals.random_draws import draw_whole

from .gradients import bits_of, local
from .graph.containers import tensors_in
from .loss_check import OF_RUNS, end_of_graph
from .model_setup import ModelSetup
from .sharded_parameters import ShardedParameters
from .swap import FORWARDS, ParameterSwap

STEPS = 3  # of a run, in which bits are compared
Sums = dict[str, int]
OF_LOOP = "Change parameters and gradients on all ranks alike"
REMEDY = (
    "Write no parameter in the forward: compute what it needs from the parameter (as "
    "torch.nn.utils.parametrize does), or write between two steps"
)


class WrittenParameters:
    """Watches the parameters of one rank, in steps and between them."""

    def __init__(self, built: ModelSetup) -> None:
        self._built, units = built, built.units
        self._left = 0 if built.mesh.plan.elastic else STEPS  # which newcomers would count anew
        self._replicas = not isinstance(units, (ShardedParameters, ParameterSwap))
        self._stepping = False
        self.rows = self.begun = 0  # of the caller's last forward: what it took, and where its graph ends
        self._versions: list[int] | None = None  # when a step began
        self._before: Sums = {}  # likewise, in the first steps
        self._first: Sums | None = None  # after its first forward
        self._compared: set[str] = set()  # what forwards have written, the same on all ranks
        units.root.register_forward_hook(self._note, with_kwargs=True)
        if isinstance(units, ParameterSwap):
            units.watched = FORWARDS
        self.follow()

    def __deepcopy__(self, _memo: dict[int, Any]) -> WrittenParameters:
        """A copy of the model, such as one that is recorded, is not watched."""
        made = object.__new__(WrittenParameters)
        made._versions, made._stepping = None, True
        return made

    def follow(self) -> None:
        """Take the parameters as they are now."""
        self._named, units = self._built.named, self._built.units
        self._copies = GatheredCopies(units.root) if isinstance(units, ShardedParameters) else None
        cut = {name: isinstance(value, DTensor) for name, value in self._named.items()}
        watched = self._named if self._replicas else {}
        self._values = [local(v.detach()) if cut[name] else v for name, v in watched.items()]
        self.numbers = {id(value) for value in self._named.values()}  # weak references would forbid Module.to
        OF_RUNS.add(self)
        draw_whole(self._named.values())
        self._wrapped = WrappedTensors(self._named.items())
        modules = self._built.model.named_modules()
        held = [(path, module._parameters) for path, module in modules if module._parameters]
        self._places = [(path, there, [*there.values()]) for path, there in held]

    def outside(self) -> str:
        """What the program has done to parameters since the last step that is lost; "": nothing."""
        told = self._done_outside()
        if told:
            self.follow()
        return told

    def _done_outside(self) -> str:
        if self._copies is not None and (written := self._copies.written()):
            return (
                f'the parameter "{self._name(*written[0])}" was written where this plan has a copy of it: in '
                "a forward outside a step, or after one. The copy is lost. Write with torch.no_grad() after "
                "a step, into what run.model.parameters() then yields"
            )
        if (name := self._wrapped.assigned()) is not None:
            return (
                f'the parameter "{name}" was assigned (p.data = t, or what does so: vector_to_parameters, '
                "swap_tensors, Module.to), which has no effect on the part of it that this rank has. "
                "Write in place: with torch.no_grad(): p.mul_(0.5), or p.copy_(t)"
            )
        for path, there, known in self._places:
            same = len(there) == len(known) and all(map(operator.is_, there.values(), known))
            if not same and (name := self._replaced(there, known)) is not None:
                return (
                    f'"{f"{path}.{name}".lstrip(".")}" is another Parameter than the plan has, as after '
                    "load_state_dict(assign=True) or module.weight = nn.Parameter(...): no rank would train "
                    "it. Do it before parallelize, or write in place"
                )
        return ""

    def _replaced(self, there: dict[str, Any], known: list[Any]) -> str | None:
        """The name of a parameter of a module that the plan does not know."""
        units: Any = self._built.units
        shown = [] if self._copies is None else [one for pair in units.shown() for one in pair]
        right = {id(one) for one in (*known, *shown)}
        others = {name: now for name, now in there.items() if now is not None and id(now) not in right}
        gone = len({id(was) for was in known} - {id(now) for now in there.values()}) > 0
        return next((name for name, now in others.items() if gone or now.requires_grad), None)

    def begin(self) -> None:
        """A step begins."""
        self._stepping = True
        if self._replicas:
            self._first, self._versions = None, [value._version for value in self._values]
            self._before = self._sums(self._named) if self._left else {}

    def written(self, forwards: int) -> tuple[bool, str]:
        """Whether ranks must compare what the forwards of this step have written, and why it is wrong; "": it
        is not.
        """
        if self._copies is not None and (copies := self._copies.written()):
            return False, (
                f'the forward writes the parameter "{self._name(*copies[0])}", and this plan would lose it: '
                f"what computes is a copy. {REMEDY}"
            )
        if self._versions is None:
            return False, ""
        now, first = self._sums(self._suspects()), self._first or {}
        changed = {name for name, found in now.items() if found != self._before.get(name)}
        again = next((name for name in now if now[name] != first.get(name)), None)
        if changed and again is not None and forwards > 1:
            return True, (
                f'the forward writes the parameter "{again}", and this step runs it {forwards} times, '
                f"where one process runs it once. {REMEDY}"
            )
        new = changed if self._left else changed - self._compared
        self._compared |= changed
        return bool(new), ""

    def end(self) -> None:
        """A step ends."""
        self._left -= self._stepping and self._left > 0
        self._versions, self._stepping = None, False

    def is_early(self) -> bool:
        """Whether this update of the caller's loop is one of the first."""
        self._left -= (early := self._left > 0)
        return early

    def check_ranks(self, *, own_loop: bool = False) -> None:
        """Compare what the data ranks have written. All ranks call this, once one of them has."""
        mesh = self._built.mesh
        if mesh.plan.copies == 1 or mesh.plan.expert > 1 or not self._replicas or not self._named:
            return
        sums = torch.tensor([*self._sums(self._named).values()], device=mesh.axes.device_type)
        most, least = sums.clone(), sums.clone()
        with record_function("up::agree|written parameters"):
            for group in (mesh.group("replica"), mesh.group("shard")):
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
                dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        for name, differs in zip(self._named, (most != least).tolist(), strict=True):
            if differs:
                who, remedy = ("loop changes", OF_LOOP) if own_loop else ("forward writes", REMEDY)
                raise RuntimeError(
                    f'the {who} the parameter "{name}", and data ranks write different values: each has its '
                    f"own rows. {remedy}"
                )

    def _name(self, *ways: Tensor) -> str:
        """The name of a parameter, which the model shows in one of these ways."""
        named = self._built.named.items()
        return next((name for name, value in named if any(value is way for way in ways)), "")

    def _note(self, _module: Any, args: Any, named: Any, output: Any) -> None:
        if self._versions is not None and self._first is None:
            self._first = self._sums(self._suspects())
        if not self._stepping and torch.is_grad_enabled():
            first = next(tensors_in((args, named)), None)
            self.rows = len(first) if first is not None and first.dim() else 0
            self.begun = end_of_graph()
            units: Any = self._built.units
            for tensor in tensors_in(output) if isinstance(units, ShardedParameters) else ():
                if tensor.requires_grad:
                    tensor.register_hook(units.note_gradient)

    def _suspects(self) -> Iterable[str]:
        """What may have been written since the step began: in the first steps all."""
        if self._left or self._versions is None:
            return self._named
        pairs = zip(self._named, self._values, self._versions, strict=True)
        return [name for name, value, version in pairs if value._version != version]

    @torch.no_grad()
    def _sums(self, names: Iterable[str]) -> Sums:
        """The sum of each parameter's bits, by name."""
        names = [*names]
        sums = [bits_of(local(self._named[name])).sum(dtype=torch.int64) for name in names]
        return dict(zip(names, torch.stack(sums).tolist() if sums else [], strict=True))


def raise_written(name: str | None, lost: str) -> None:
    """Raise, on all ranks, the error of a step whose forward has written what one process keeps otherwise.

    Args:
        name: a buffer that changed in both forwards of a unit.    lost: why a parameter is wrong now.
    """
    if lost:
        raise RuntimeError(lost)
    what = f"buffer {name!r}" if name else "a buffer of another rank"
    raise RuntimeError(
        f"recompute= runs each unit's forward again in backward, and has changed {what} twice. Leave out "
        "recompute, or use a layer without such buffers, such as GroupNorm or LayerNorm"
    )
