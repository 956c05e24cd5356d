"""Handles an exception in a call of a run: all ranks continue together, or no rank can use the run any more.

When a rank leaves a step, other ranks may wait for it, and its messages may reach the next step. So it
writes the error to the job's store, which other ranks read later.

    all ranks raised, and got equally far   -> each raises its own error; the next call starts anew
    some did not within RAISED_S            -> the run's groups are aborted: ranks that wait in them raise,
    a group of the run has failed           -> likewise, at once
    messages of a pipeline may be left      -> likewise, at once

Errors of PyTorch's that a plan has caused are explained in the user's terms: which module, which rule, what
to write. Only where the plan is the reason: types that low precision mixed or that have no operator, units
that backward computed again or that write into their inputs, parameters that were freed before a second
gradient, and those that only some ranks use under ZeRO.
"""

from __future__ import annotations

import contextlib
import re
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from unisono.errors import Mismatch, Timeout
from unisono.torch.process_group import ProcessGroupUnisono
from unisono.torch_internals import c10d

from .plan import NEEDS, Plan
from .sharded_parameters import TYPES
from .structure import plain_class

RAISED_S = 5.0  # how long a rank that raised waits for the others to raise, too
PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.32
TOGETHER = "all ranks raised"


class RunFailures:
    """The calls of one run, and their outcome on all ranks."""

    def __init__(self, world: dist.ProcessGroup, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups: list[Any] = list(groups)
        self._rank, self._ranks = world.rank(), world.size()
        _, store = c10d.world()
        self._store: Any = c10d.PrefixStore(f"unisono.parallel/{world.group_name}", store)
        self._calls = 0
        self._ended: str | None = None  # why the run cannot be used

    @property
    def ended(self) -> bool:
        """Whether the run cannot be used any more."""
        return self._ended is not None

    def begin(self) -> None:
        """Count one more call that all ranks make."""
        if self._ended is not None:
            raise RuntimeError(self._ended)
        self._calls += 1

    def resolve(self, error: Exception, *, together: bool) -> None:
        """Decide what the error of this call means; returns if the caller has to raise it.

        Args:
            together: whether ranks may go on where all of them raised.
        Raises:
            RuntimeError: another rank has ended the run.
        """
        if self._ranks == 1:
            return
        mine = f"rank {self._rank} raised {type(error).__name__}: {error}"
        try:
            verdict = self._verdict(mine, together=together and not self._over())
        except RuntimeError as lost:  # the store: the process that served it has ended
            verdict = f"{mine} (and the store of the job failed: {lost})"
        if verdict == TOGETHER:
            return
        self._ended = (
            f"this run cannot be used any more: {verdict}. Make a new one with up.parallelize on all ranks, "
            "and load its last checkpoint"
        )
        self._abort(error)
        if not (verdict.startswith(mine) or isinstance(error, (Mismatch, Timeout))):
            raise RuntimeError(self._ended) from error

    def _abort(self, error: Exception) -> None:  # noqa: ARG002
        """End the groups of the run, because of this error."""
        for group in self._groups:
            with contextlib.suppress(RuntimeError):  # Gloo has no abort: there, ranks run into their timeout
                group.abort()

    def _verdict(self, mine: str, *, together: bool) -> str:
        """The verdict, the same on all ranks: TOGETHER, or which rank has ended the run, and why."""
        if self._store.check(["ended"]):
            return str(self._store.get("ended").decode())
        call = f"call {self._calls}"
        if together:
            self._await_others(call)
        verdict: str = self._store.compare_set(f"{call}/verdict", "", mine).decode()
        if verdict != TOGETHER:
            self._store.set("ended", verdict)
        return verdict

    def _await_others(self, call: str) -> None:
        """Wait for the verdict: the last rank that raises after as many collectives as the first writes it.

        How many requests a rank makes does not depend on the number of ranks.
        """
        mine, until, pause = self._place(), time.monotonic() + RAISED_S, PAUSE_S
        if self._store.compare_set(f"{call}/place", "", mine).decode() != mine:
            return
        if self._store.add(f"{call}/raised", 1) == self._ranks:
            self._store.compare_set(f"{call}/verdict", "", TOGETHER)
        while not (self._store.check([f"{call}/verdict"]) or self._store.check(["ended"])):
            if time.monotonic() > until:
                return
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _over(self) -> bool:
        """Whether a group of this run has failed: it stays so. Groups of Gloo's do not tell."""
        ours = [group for group in self._groups if isinstance(group, ProcessGroupUnisono)]
        return any(group.get_error() != c10d.ErrorType.SUCCESS for group in ours)

    def _place(self) -> str:
        return str([group._get_sequence_number_for_group() for group in self._groups])


class _Rule(NamedTuple):
    """A RuntimeError of PyTorch's: what its text has, under which plans, and what is raised in its place."""

    pattern: str
    applies: Callable[[Plan], bool]
    error: type[Exception]
    says: str


MIXED = r"same dtype|expected scalar type|[Ii]nput type .* and (weight|bias) type|mixed dtype"
MISSING = r"BFloat16|Half|[Ll]ow precision"
LOW_PATTERN = f"{MIXED}|{MISSING}"
RULES = (
    _Rule(
        MIXED,
        lambda plan: plan.low,
        ValueError,
        "precision={plan.precision!r}: {place} mixes {plan.precision} with another type, as of a buffer or "
        "of a tensor that it makes: {line}. {remedy}",
    ),
    _Rule(
        MISSING,
        lambda plan: plan.low,
        ValueError,
        "precision={plan.precision!r}: {place} runs what PyTorch does not have in {plan.precision}: {line}. "
        "{remedy}",
    ),
    _Rule(
        r"Output \d+ of \w+ is a view and is being modified inplace.*custom Function",
        lambda _: True,
        ValueError,
        "{plan}: {place} writes into the tensor that its unit takes, as an activation with inplace=True "
        "does. A unit is an entry of an nn.Sequential or nn.ModuleList. Write inplace=False, or x = x + y "
        "in place of x += y",
    ),
    _Rule(
        r"modified by an inplace operation",
        lambda plan: plan.context > 1 or plan.pipeline > 1,
        RuntimeError,
        "{plan}: backward needs a value that the program writes in place. A recorded program does not tell "
        "a write by .data from one by .detach(): write x = x * 0.5 in place of x.data.mul_(0.5). {line}",
    ),
    _Rule(
        r"out of bounds for storage of size 0",
        lambda plan: plan.zero == 3 or plan.swap is not None,
        RuntimeError,
        "{plan}: backward needs parameters of a unit that are freed: the forward or the loss takes gradients "
        "through units (torch.autograd.grad), of which gradients are taken again. Use zero=2, without swap",
    ),
    _Rule(
        r"mixed torch\.Tensor and DTensor",
        lambda plan: plan.zero > 0,
        RuntimeError,
        "{plan}: {place} takes parameters of a unit that does not run now, so they are in parts: by "
        "functional_call, named_parameters(), as the weight of another module, or after gradients through "
        "units in its forward (torch.autograd.grad). Call the module, or use zero=0. {line}",
    ),
)
RECOMPUTING = ("torch/utils/checkpoint.py", "_composable/checkpoint_activation.py")


def explained(error: BaseException, model: nn.Module, plan: Plan) -> Exception | None:
    """The error to raise in place of `error`; None: the plan is not the reason."""
    for rule in RULES if isinstance(error, RuntimeError) else ():
        if rule.applies(plan) and re.search(rule.pattern, str(error), re.DOTALL):
            (module, place), line = _place(error, model), _first_line(error)
            remedy = _remedy(module, plan) if plan.low else ""
            return rule.error(rule.says.format(plan=plan, place=place, line=line, remedy=remedy))
    if plan.recompute and _recomputed(error):
        return RuntimeError(
            f"recompute={plan.recompute!r}: a unit was not computed again as it ran: its forward takes "
            "gradients (torch.autograd.grad), freezes parameters, or writes into its input, a cache or a "
            f"state: {_first_line(error) or type(error).__name__}. Write recompute=False"
        )
    if plan.zero and not plan.uneven_use and isinstance(error, Mismatch) and "reduce_scatter" in str(error):
        return RuntimeError(
            f"ranks reduce the gradients of different parameters under {plan}. If ranks may leave different "
            f"parameters unused, write Plan(uneven_use=True). {error}"
        )
    return None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "").rstrip(".")


def _recomputed(error: BaseException) -> bool:
    """Whether PyTorch's activation checkpointing raised it, or what it computed again."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.endswith("contextlib.py")
    ]
    again = any(frame.name == "unpack_hook" and frame.filename.endswith(RECOMPUTING) for frame in frames)
    return isinstance(error, Exception) and (
        again or bool(frames and frames[-1].filename.endswith(RECOMPUTING))
    )


def _remedy(module: nn.Module, plan: Plan) -> str:
    """What to write where a module does not compute in low precision."""
    needs = NEEDS["precision='autocast'"]
    without = [f"{need.field}=" for need in needs if getattr(plan, need.field) not in need.values]
    autocast = f"write precision='autocast'{' without ' * bool(without)}{', '.join(without)}"
    told = [autocast, 'keep this module in f32 (keep_f32=("its.path",)), or cast in its forward']
    return _joined([*_of_buffers(module, TYPES[plan.precision]), *told])


def recorded_remedy(error: BaseException | None, model: nn.Module, dtype: torch.dtype) -> str | None:
    """What to write where the program of `model` cannot be recorded in `dtype`; None: that is not the reason.

    Args:
        error: of PyTorch's, in the recording.
    """
    if not isinstance(error, RuntimeError) or not re.search(LOW_PATTERN, str(error), re.DOTALL):
        return None
    autocast = "write precision='autocast', which goes without pipeline= and context="
    return _joined([*_of_buffers(model, dtype), autocast, "cast in its forward"])


def _of_buffers(module: nn.Module, dtype: torch.dtype) -> list[str]:
    """What to write if the module has floating buffers of another type."""
    floats = ((name, value) for name, value in module.named_buffers() if value.is_floating_point())
    names = [name for name, value in floats if value.dtype != dtype]
    cast = {torch.bfloat16: "bfloat16", torch.half: "half"}[dtype]
    return [
        f"buffers stay as they are ({', '.join(names)}): write module.{name} = module.{name}.{cast}() before "
        f"parallelize, which model.{cast}() would do"
        for name in names[:1]
    ]


def _joined(told: list[str]) -> str:
    text = "; or ".join(told)
    return text[0].upper() + text[1:]


def _place(error: BaseException, model: nn.Module) -> tuple[nn.Module, str]:
    """The innermost module of the user's that ran, with its path and the line."""
    paths = {module: path for path, module in model.named_modules()}
    found, place = model, plain_class(model).__name__
    for frame, line in traceback.walk_tb(error.__traceback__):
        module: Any = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in paths and not _is_of(frame, "torch."):
            kind, path = plain_class(module).__name__, paths[module]
            named = f'"{path}" ({kind})' if path else kind
            found, place = module, f"{named}, at {frame.f_code.co_filename}:{line},"
    return found, place


def _is_of(frame: FrameType, package: str) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(package)


def is_ours(error: BaseException) -> bool:
    """Whether code of Unisono has raised it, not that of the model, its optimizer or PyTorch."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return _is_of(frame, "unisono.")
