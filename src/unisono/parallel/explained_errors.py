"""Errors of PyTorch's that a plan has caused, in the user's terms: which module, which rule, what to write.

Only where the plan is the reason: types that low precision mixed, units that backward computed again, and
parameters that only some ranks use under ZeRO.
"""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any

from torch import nn

from unisono.errors import Mismatch

from .plain_class import plain_class

if TYPE_CHECKING:
    from types import FrameType

    from .plan import Plan

MIXED = re.compile(r"same dtype|expected scalar type|[Ii]nput type .* and (weight|bias) type|mixed dtype")
RECOMPUTING = ("torch/utils/checkpoint.py", "_composable/checkpoint_activation.py")


def explained(error: BaseException, model: nn.Module, plan: Plan) -> Exception | None:
    """The error to raise in place of `error`; None: the plan is not the reason."""
    if plan.precision != "f32" and isinstance(error, RuntimeError) and MIXED.search(str(error)):
        return ValueError(
            f"precision={plan.precision!r}: {_place(error, model)} mixes {plan.precision} with another type, "
            f"as of a buffer or of a tensor that it makes: {_first_line(error)}. Keep this module in f32 "
            '(keep_f32=("its.path",)), or cast in its forward'
        )
    if plan.recompute and _recomputed(error):
        return RuntimeError(
            f"recompute={plan.recompute!r}: a unit was not computed again as it ran: its forward takes "
            "gradients (torch.autograd.grad), freezes parameters, or adds to a cache or a state: "
            f"{_first_line(error) or type(error).__name__}. Write recompute=False"
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


def _place(error: BaseException, model: nn.Module) -> str:
    """The innermost module of the user's that ran, and the line."""
    paths = {module: path for path, module in model.named_modules()}
    place = plain_class(model).__name__
    for frame, line in traceback.walk_tb(error.__traceback__):
        module: Any = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in paths and not _of_torch(frame):
            named = (
                f'"{paths[module]}" ({plain_class(module).__name__})'
                if paths[module]
                else plain_class(module).__name__
            )
            place = f"{named}, at {frame.f_code.co_filename}:{line},"
    return place


def _of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("torch.")
