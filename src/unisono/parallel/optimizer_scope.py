"""What the update of a value depends on, found by behaviour: copies of an optimizer step small parameters.

| scope | an update depends on | for example |
|---|---|---|
| VALUE | this value, and its gradients | AdamW, Lion |
| PARAMETER | all values of its parameter | Muon, LARS, Adafactor |
| ALL | the other parameters, too | a norm over all, D-Adaptation, Prodigy |

The same steps run again with other values and gradients of some parameters, or of every second value. What
moves otherwise depends on them. The caller's optimizer, its hooks and its random numbers are left alone.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn, optim

from unisono.errors import UnfitError
from unisono.torch_internals.training import without_hooks

from .generators import default_generators, drawing, states_of
from .gradients import equal
from .graph.containers import tensors_in

VALUE, PARAMETER, ALL = range(3)
# known as VALUE: the state of a parameter is numbers, and tensors that are cut as the parameter is
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adadelta, optim.Adagrad, optim.Adamax, optim.ASGD, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop,
)  # fmt: skip
SIZES = {1: 8, 2: 6}  # the largest dimension of a stand-in, by its number of dimensions
WIDE = {1: 32, 2: 130}  # some optimizers take small matrices for vectors
STEPS, WIDE_STEPS = 12, 2
SEED = 0x5EED


class OptimizerScope(NamedTuple):
    """How an optimizer steps.

    Attributes:
        scope: VALUE, PARAMETER or ALL.
        together: it does not step the parameters of one unit after those of another.
        cut: it steps a matrix otherwise than the parts of it.
        closure: its step needs one.
        draws: it draws random numbers.
        unknown: why it could not be tried; "": it was.
    """

    scope: int = VALUE
    together: bool = False
    cut: bool = False
    closure: bool = False
    draws: bool = False
    unknown: str = ""

    def joined(self, other: OptimizerScope) -> OptimizerScope:
        """What holds for the parameters of two ranks."""
        pairs: Any = zip(self, other, strict=True)
        return OptimizerScope(*map(max, pairs))


class ScopeLimits(NamedTuple):
    """What an optimizer may look at under a plan.

    Attributes:
        plan: as a text.
        part: which parameters a rank has, where these are not all.
        units: it steps some parameters after the others.
        fused: a layer of which the tensor axis has made several.
        closure: an optimizer may need one, for `Run.update(closure)`.
    """

    plan: str
    part: str = ""
    units: bool = False
    fused: str = ""
    closure: bool = False

    def scope_of(self, optimizer: optim.Optimizer) -> OptimizerScope:
        """Try an optimizer, as far as this plan asks for it."""
        return scope_of(optimizer, scopes=bool(self.part), units=self.units, cuts=bool(self.fused))

    def check(self, optimizer: optim.Optimizer, found: OptimizerScope) -> None:
        """Raise ValueError for an optimizer that would step otherwise than in one process."""
        name = f"parallelize: {type(optimizer).__name__}"
        use = "Use an optimizer that changes each value by itself, such as AdamW"
        if found.closure and not self.closure:
            refuse_closure(optimizer)
        if self.part and found.scope == ALL:
            raise UnfitError(
                f"{name} looks at all parameters in a step, such as for a norm, and under {self.plan} a rank "
                f"has {self.part}. {use}, or data= and zero=, where it sees all"
            )
        if self.part and found.draws:
            raise UnfitError(
                f"{name} draws random numbers in a step, and under {self.plan} a rank has {self.part}, so it "
                f"would draw others than one process. {use}, or data= and zero="
            )
        if self.units and found.together:
            raise UnfitError(
                f"{name} steps all parameters together, or counts its steps, and under {self.plan} it steps "
                f"those of one unit after those of another. {use}, or leave out swap="
            )
        if self.fused and found.cut:
            raise UnfitError(
                f'{name} looks at whole matrices, and {self.plan} has cut "{self.fused}" into several. '
                f'{use}, or write cuts={{"{self.fused}": "whole"}}'
            )
        if found.unknown and (self.part or self.units or self.fused):
            warnings.warn(
                f"{name} could not be tried on small parameters ({found.unknown}). If it looks at more than "
                f"one value at a time, it may step otherwise than in one process under {self.plan}",
                stacklevel=2,
            )


def takes_closure(optimizer: optim.Optimizer) -> bool:
    """Whether its step has an argument without a default, as LBFGS."""
    _, *found = inspect.signature(type(optimizer).step).parameters.values()  # a scheduler wraps its own
    return any(one.default is one.empty and one.kind <= one.POSITIONAL_OR_KEYWORD for one in found)


def refuse_closure(optimizer: optim.Optimizer) -> NoReturn:
    """Raise ValueError for an optimizer that computes the loss by itself."""
    raise UnfitError(
        f"{type(optimizer).__name__}.step needs a closure that computes the loss again, and run.step "
        "computes it once. Use run.update(closure) with data= and zero=, not in fp16, or an optimizer whose "
        "step() takes no argument: AdamW"
    )


def limits_of(built: Any) -> ScopeLimits:
    """What an optimizer may look at in a model that is set up."""
    plan, experts = built.mesh.plan, built.experts
    listed = experts is not None and any(experts.spread(name) > 1 for name in experts.names)
    part = "the parameters of its stage" if plan.pipeline > 1 else "those of its experts" if listed else ""
    fused = "" if built.decision is None else next(iter(built.decision.cut.fused), "")
    closure = not plan.why_no_own_loop and plan.precision != "fp16"
    return ScopeLimits(str(plan), part, plan.swap is not None, fused, closure)


def scope_of(
    optimizer: optim.Optimizer, *, scopes: bool = True, units: bool = True, cuts: bool = True
) -> OptimizerScope:
    """Try an optimizer, before its first step.

    Args:
        scopes, units, cuts: find `scope`, `together`, `cut`. `closure` is always found.
    """
    if type(optimizer) in ELEMENTWISE or not any(group["params"] for group in optimizer.param_groups):
        return OptimizerScope()
    error: Exception | None = None
    with torch.no_grad():
        for few in (True, False):  # some have lists of their own beside those of their groups
            try:
                if takes_closure(optimizer) or _fails_without_closure(optimizer, few):
                    return OptimizerScope(closure=True)
                tries = scopes or units or cuts
                return _tried(optimizer, few, units=units, cuts=cuts) if tries else OptimizerScope()
            except Exception as raised:  # noqa: BLE001  whatever it does with parameters that it does not know
                error = error or raised
    return OptimizerScope(unknown=f"{type(error).__name__}: {error}"[:200])


def _tried(optimizer: optim.Optimizer, few: bool, *, units: bool, cuts: bool) -> OptimizerScope:
    scope, draws, trial = VALUE, False, partial(_ScopeTrial, optimizer, few)
    late = _late(optimizer)
    tries: list[tuple[dict[int, int], int, Set[str]]] = [(SIZES, STEPS, frozenset())]
    if few and any(_sizes(p, WIDE) != _sizes(p, SIZES) for p in _all(optimizer)):
        tries.append((WIDE, WIDE_STEPS, frozenset()))
    if late:  # one may turn others off
        tries += [(SIZES, STEPS, late - {name}) for name in ("", *sorted(late)) if late != {name}]
    for sizes, steps, early in tries:
        how = partial(trial, sizes, steps, early=early)
        trials = [how(change=each) for each in (_none, _of_twins, _of_every_second)]
        scope = _scope_in(trials)
        draws = draws or trials[0].drew
        if scope != VALUE:
            break
    trial = partial(trial, early=early if scope != VALUE else frozenset())
    together = scope == ALL or (units and not trial().is_alike(trial(apart=True)))
    cut = scope != VALUE and cuts and not trial().is_alike(trial(halves=True))
    return OptimizerScope(scope, together, cut, draws=draws)


def _scope_in(trials: Sequence[_ScopeTrial]) -> int:
    """What values depend on, from runs as they are, with other twins, with other second values."""
    try:
        plain, twins, second = (trial.run() for trial in trials)
    except Exception:
        if trials[0].early:  # it does not take such numbers
            return VALUE
        raise
    if any(not equal(a, b) for a, b in zip(plain[::2], twins[::2], strict=True)):
        return ALL
    return PARAMETER if any(not equal(a[::2], b[::2]) for a, b in zip(plain, second, strict=True)) else VALUE


Change = Callable[[int, Tensor], Tensor]  # of the values or gradients of a parameter, by its number


def _none(_number: int, values: Tensor) -> Tensor:
    return values


def _of_twins(number: int, values: Tensor) -> Tensor:
    """Every second parameter is the twin of the one before."""
    return values * -40 + 1 if number % 2 else values


def _of_every_second(_number: int, values: Tensor) -> Tensor:
    values[1::2] = values[1::2] * -40 + 1
    return values


class _ScopeTrial:
    """Some steps of a copy of an optimizer, whose groups have small parameters in place of theirs.

    Args:
        few: of each group the first parameter of each number of dimensions is there, and a twin of it. Else
            all are.
        change: of values and gradients.
        apart: each step is two, of every second parameter, and of the others.
        early: these numbers are 2: what begins after many steps, or at a size, is seen.
        halves: two parameters, each a half, stand for one whose dimension 0 is even.
    """

    def __init__(
        self, optimizer: optim.Optimizer, few: bool, sizes: dict[int, int] = SIZES, steps: int = STEPS,
        change: Change = _none, *, early: Set[str] = frozenset(), apart: bool = False,
        halves: bool = False,
    ) -> None:  # fmt: skip
        self.early, self.drew = early, False
        self._change, self._steps, self._apart, self._halves = change, steps, apart, halves
        self._whole: list[list[nn.Parameter]] = []  # what stands for each parameter
        every = [*_optimizers(optimizer)]
        memo: dict[int, Any] = {id(p): _stand_in(p, sizes) for one in every for p in _all(one)}
        shapes = {p.shape for one in every for p in _all(one)}
        blanks = {
            id(t): _blank(t, sizes) for one in every for t in tensors_in(vars(one)) if t.shape in shapes
        }
        memo = blanks | memo | {id(one): object.__new__(type(one)) for one in every}
        for one in every:
            memo[id(one)].__dict__.update(copy.deepcopy(without_hooks(one), memo))
        groups = [group for one in every for group in memo[id(one)].param_groups]
        for held in [vars(memo[id(one)]) for one in every] + groups:
            held.update((name, 2) for name in early if _is_late(held.get(name)))
        for some in {id(group["params"]): group["params"] for group in groups}.values():
            some[:] = self._chosen(some) if few else self._given(some)
        self.optimizer = memo[id(optimizer)]
        self.before = self.values()

    def _chosen(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The first of each number of dimensions, each with a twin, or with halves."""
        firsts = {p.dim(): p for p in reversed(parameters)}.values()
        pairs = [each for p in firsts for each in self._given([p, copy.deepcopy(p)])]
        if not self._halves:
            return pairs
        for place, (one,) in enumerate(self._whole):
            if one.dim() > 1 and len(one) % 2 == 0:
                self._whole[place] = [nn.Parameter(half.clone()) for half in one.chunk(2)]
        return [half for several in self._whole[-len(pairs) :] for half in several]

    def _given(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """These, with their first values: some zeros, so that the smallest update shows."""
        for one in parameters:
            number = len(self._whole)
            count = torch.arange(one.numel(), device=one.device, dtype=torch.float64)
            values = torch.sin(1.0 + 1.7 * count + number) * 0.1 * (count % 3 > 0)
            one.copy_(self._change(number, values).view(one.shape))
            self._whole.append([one])
        return [*parameters]

    def give(self, step: int, first: int = 0, stride: int = 1) -> None:
        """Give some parameters a gradient, and the others none. Its size changes from step to step."""
        for number, several in enumerate(self._whole):
            size = sum(p.numel() for p in several)
            count = torch.arange(size, device=several[0].device, dtype=torch.float64)
            gradient = self._change(
                number, torch.cos(0.7 * count + number) * math.exp(1.5 * math.sin(1.3 * step))
            )
            for one, part in zip(several, gradient.split([p.numel() for p in several]), strict=True):
                one.grad = part.view(one.shape).to(one.dtype) if number % stride == first else None

    def run(self) -> list[Tensor]:
        """The parameters after the steps."""
        parts = 2 if self._apart else 1
        device_type = self._whole[0][0].device.type
        with drawing(SEED, device_type):
            before = states_of(default_generators(device_type))
            for step, first in itertools.product(range(self._steps), range(parts)):
                self.give(step, first, parts)
                take_step(self.optimizer)
            after = states_of(default_generators(device_type))
        self.drew = not all(map(torch.equal, before, after))
        return self.values()

    def values(self) -> list[Tensor]:
        """Each parameter, flat."""
        return [torch.cat([p.detach().flatten() for p in several]) for several in self._whole]

    def is_alike(self, other: _ScopeTrial) -> bool:
        """Whether the other one moves the parameters as this one, but for rounding."""
        wanted = self.run()
        try:
            found = other.run()
        except Exception:  # noqa: BLE001  it does not take this
            return False
        moved = [b - a for a, b in zip(self.before, wanted, strict=True)]
        far = [
            (b - a - move).abs().max() <= 1e-3 * move.abs().max()
            for a, b, move in zip(other.before, found, moved, strict=True)
        ]
        return all(far)


def take_step(optimizer: Any, *closure: Any) -> None:
    """Call the step of its class, without the hooks around it."""
    step = type(optimizer).step
    if callable(getattr(optimizer, "train", None)):  # of averages without a schedule
        optimizer.train()
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, *closure)


def _fails_without_closure(optimizer: optim.Optimizer, few: bool) -> bool:
    """Whether a step fails without a closure, and not with one."""
    try:
        _ScopeTrial(optimizer, few, steps=1).run()
    except Exception:  # noqa: BLE001  tried again below
        trial = _ScopeTrial(optimizer, few)
        trial.give(0)

        def closure() -> Tensor:
            trial.give(1)
            return torch.ones((), requires_grad=True)

        take_step(trial.optimizer, closure)
        return True
    return False


def _optimizers(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, optim.Optimizer):
            yield from _optimizers(value)


def _is_late(value: Any) -> bool:
    """Whether this may be a number of steps, or a size, that a trial does not reach."""
    return type(value) is int and value > STEPS


def _late(optimizer: Any) -> frozenset[str]:
    held = [vars(one) for one in _optimizers(optimizer)] + [*optimizer.param_groups]
    return frozenset(name for each in held for name, value in each.items() if _is_late(value))


def _all(optimizer: Any) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _sizes(like: Tensor, sizes: dict[int, int]) -> tuple[int, ...]:
    return tuple(min(size, sizes.get(like.dim(), 4)) for size in like.shape)


def _blank(like: Tensor, sizes: dict[int, int]) -> Tensor:
    return torch.zeros(_sizes(like, sizes), dtype=like.dtype, device=like.device)


def _stand_in(parameter: nn.Parameter, sizes: dict[int, int]) -> nn.Parameter:
    found = nn.Parameter(_blank(parameter, sizes))
    vars(found).update({k: v for k, v in vars(parameter).items() if k not in ("_local_tensor", "_spec")})
    return found
