"""The optimizers of a run: what the caller's function gets and makes, at first and later; their steps.

An optimizer of PyTorch that changes each value by itself gets this rank's parts of cut parameters as plain
tensors for the time of its step. With DTensors it would compute the same bits, and each operation on each
parameter would pay for PyTorch's dispatch, which takes longer than the arithmetic of a small model.

Any other optimizer steps DTensors, on all ranks alike: the numbers that it reads are those of whole
parameters.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from unisono.errors import UnfitError
from unisono.torch.control_data import on_every_rank
from unisono.torch_internals.dtensor import reading_together
from unisono.torch_internals.training import has_step_hooks

from .gradients import gradient, local
from .optimizer_scope import ELEMENTWISE, OptimizerScope, ScopeLimits, refuse_closure, takes_closure
from .replicated_parameters import like


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
) -> tuple[Any, list[torch.optim.Optimizer], torch.optim.Optimizer | None]:
    """What the caller's function makes, the optimizers in it, and one that needs a closure. All ranks of the
    group call this.

    Raises:
        ValueError, TypeError: they are none, or step otherwise than in one process, also where that is so on
            another rank only.
    """
    found: Any = None
    problem: Exception | None = None
    scopes: list[OptimizerScope] = []
    try:
        made = _made(make, given)
        found = made, optimizers_of(made, given, swap=limits.units, closures=True)
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
    needs: torch.optim.Optimizer | None = None
    for one, *several in everywhere:
        scope = functools.reduce(OptimizerScope.joined, (OptimizerScope(*each) for each in several))
        limits.check(one, scope)
        needs = one if scope.closure else needs
    return *found, needs


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


def optimizers_of(
    made: Any, given: Parameters, *, swap: bool, closures: bool = False
) -> list[torch.optim.Optimizer]:
    """The optimizers that the caller's function made: one, or a list of several.

    Args:
        made: what it returned.
        given: what it was given; the tensor that stands for no parameters leaves the groups.
        swap: parameters are swapped, and one optimizer has all of them.
        closures: they may need one.
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
        if takes_closure(one) and not closures:
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
    """Raise ValueError where `extend_optimizers` would not know the group of a parameter."""
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


# ---- steps of parameters that are cut ----

REMEDY = (
    "Use an optimizer that changes each value by itself, such as AdamW or up.CompressedAdam, or a plan that "
    "leaves parameters whole (zero=0, tensor=1)"
)


def has_cut_parameters(parameters: Iterable[Tensor]) -> bool:
    """Whether some of them are DTensors."""
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def step(optimizer: optim.Optimizer, *closure: Callable[[], Any], cut: bool) -> None:
    """Call `optimizer.step()`, once. Groups, state and parameters are the same objects afterwards.

    Args:
        closure: one, or none.
        cut: some parameters are DTensors.
    Raises:
        RuntimeError: the optimizer has an operation that PyTorch does not have for parameters that are cut.
    """
    if not cut:
        optimizer.step(*closure)
        return
    if steps_parts(optimizer):
        with _parts(optimizer):
            optimizer.step()
        return
    try:
        with reading_together():
            optimizer.step(*closure)
    except Exception as error:
        if not _of_dtensor(error):
            raise
        raise RuntimeError(_cannot_step(optimizer, error)) from error


def tell_of_hooks(optimizers: Iterable[optim.Optimizer], plan: object) -> bool:
    """Warn of hooks around a step, or a step in place of the class's, that see a part of the parameters."""
    for one in optimizers:
        if has_step_hooks(one):
            warnings.warn(
                f"{type(one).__name__} has hooks of its step, or another step than its class's, and under "
                f"{plan} these see some of the parameters at a time. One that looks at several, as for a "
                "norm, does otherwise than in one process: clip by Plan(clip=...)",
                stacklevel=2,
            )
            return True
    return False


def _of_dtensor(error: Exception) -> bool:
    """Whether PyTorch's dispatch of DTensors raised it."""
    if "got mixed torch.Tensor and DTensor" in str(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return any("torch/distributed/tensor/" in frame.filename for frame in frames)


def _cannot_step(optimizer: optim.Optimizer, error: Exception) -> str:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    if "got mixed" in reason:
        reason = (
            "it computes with cut and whole ones together, where a number helps: float(norm) in place of norm"
        )
    return (
        f"{type(optimizer).__name__} cannot step parameters that are cut: PyTorch has no rule for an "
        f"operation of it on DTensors: {reason}. Some parameters may have changed: load the last checkpoint. "
        f"{REMEDY}"
    )


def refuse_cut_parameters(optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer that no PyTorch steps on DTensors, before there are any."""
    if isinstance(optimizer, optim.Adafactor):
        raise UnfitError(
            "Adafactor cannot step parameters that are cut: PyTorch has no rule for an operation of it on "
            f"DTensors. {REMEDY}"
        )


def chooses_lists(optimizer: optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether PyTorch takes its kernels of lists for a group on GPUs where nothing else is asked for.

    Adafactor takes a loop: lists need as much memory again as the parameters.
    """
    asked = group.get("foreach", False) is not None or group.get("fused") or group.get("differentiable")
    return not asked and not isinstance(optimizer, optim.Adafactor)


def steps_parts(optimizer: optim.Optimizer) -> bool:
    """Whether it gets this rank's parts as plain tensors, and draws nothing. Hooks of its step may read whole
    tensors, and draw.
    """
    return type(optimizer) in ELEMENTWISE and not has_step_hooks(optimizer)


@contextlib.contextmanager
def _parts(optimizer: optim.Optimizer) -> Iterator[None]:
    """Meanwhile the optimizer's groups have this rank's parts, with their gradients and state."""
    state, groups = optimizer.state, optimizer.param_groups
    held: Any = defaultdict(dict)
    records, stand_ins = [], []
    with torch.no_grad():
        for group in groups:
            parts: list[Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is None:  # it stays as it is, and may not be in memory
                    continue
                part = local(parameter).detach()
                part.grad = gradient(parameter)
                entries = held[part] = {key: local(value) for key, value in state.get(parameter, {}).items()}
                records.append((parameter, part, entries, dict(entries)))
                parts.append(part)
            stand_ins.append({**group, "params": parts})
    optimizer.state, optimizer.param_groups = held, stand_ins
    try:
        yield
    finally:
        optimizer.state, optimizer.param_groups = state, groups
        for group, stand_in in zip(groups, stand_ins, strict=True):  # what the step wrote into a group
            group.update({key: value for key, value in stand_in.items() if key != "params"})
    for parameter, part, entries, before in records:
        new = {key: value for key, value in entries.items() if before.get(key) is not value}
        if new:
            state[parameter].update({key: _as_cut(value, part, parameter) for key, value in new.items()})


def _as_cut(value: Any, part: Tensor, parameter: Tensor) -> Any:
    """New state of a part, as that of the parameter: a tensor of the part's shape is cut as the parameter."""
    cut = isinstance(value, Tensor) and value.dim() > 0 and value.shape == part.shape
    return like(value, parameter) if cut else value
