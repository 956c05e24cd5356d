"""Keeps torch.compile out of the process group's methods, and out of Triton's interpreter.

PyTorch's C++, such as DDP's reducer, calls them inside a compiled region. There Dynamo traces every Python
frame that is not marked, and would fail on the group. This module marks their code objects, at no cost per
call.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from .probe import PrivateName, find, optional

MODULE = "torch._C._dynamo.eval_frame:"

NAMES = {
    "set": PrivateName(
        MODULE + "set_code_exec_strategy",
        purpose="mark a method that torch.compile leaves alone",
        without="compiled DDP fails over Unisono",
    ),
    "strategy": PrivateName(
        MODULE + "_FrameExecStrategy", purpose="the mark", without="compiled DDP fails over Unisono"
    ),
    "action": PrivateName(
        MODULE + "_FrameAction.SKIP",
        purpose="the mark: this method, and what it calls",
        without="compiled DDP fails over Unisono",
    ),
}


def skip(*classes: type) -> None:
    """Make Dynamo run the methods of these classes, and everything they call, uncompiled."""
    strategy, action = find(NAMES["strategy"]), find(NAMES["action"])
    mark = optional(NAMES["set"])
    if mark is None or strategy is None or action is None:
        return
    leave = strategy(action, action)
    for one in classes:
        for method in vars(one).values():
            if isinstance(method, FunctionType):
                mark(method.__code__, leave)


def ends_graphs(*classes: Any) -> None:
    """Run the methods of these classes uncompiled, and end a graph where it calls their method `run`."""
    skip(*classes)
    for one in classes:
        one.run._torchdynamo_disable = True
