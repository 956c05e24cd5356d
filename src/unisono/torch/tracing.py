"""Keeps torch.compile out of the process group's methods.

PyTorch's C++ (DDP's reducer, for one) calls them in the middle of a compiled region, where Dynamo would trace
every Python frame it has not been told to skip, and fail on the group itself. This tells it, per code object,
at no cost to a call.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch._C._dynamo.eval_frame as dynamo

__all__ = ["skip"]


def skip(*classes: type) -> None:
    """Let Dynamo run the methods that these classes define, and what those call, as they are."""
    module: Any = dynamo  # PyTorch's stub leaves the actions out
    leave = module._FrameExecStrategy(module._FrameAction.SKIP, module._FrameAction.SKIP)
    for one in classes:
        for method in vars(one).values():
            if isinstance(method, FunctionType):
                module.set_code_exec_strategy(method.__code__, leave)
