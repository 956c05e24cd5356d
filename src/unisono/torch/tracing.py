"""Keeps torch.compile out of the process group's methods.

PyTorch's C++, such as DDP's reducer, calls them inside a compiled region. There Dynamo traces every Python
frame that is not marked, and would fail on the group. This module marks their code objects, at no cost per
call.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch._C._dynamo.eval_frame as dynamo

__all__ = ["skip"]


def skip(*classes: type) -> None:
    """Make Dynamo run the methods of these classes, and everything they call, uncompiled."""
    module: Any = dynamo  # Any: PyTorch's stub lacks the actions
    leave = module._FrameExecStrategy(module._FrameAction.SKIP, module._FrameAction.SKIP)
    for one in classes:
        for method in vars(one).values():
            if isinstance(method, FunctionType):
                module.set_code_exec_strategy(method.__code__, leave)
