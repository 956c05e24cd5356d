"""A call that a recorded program has as one operator, whatever PyTorch makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from unisono.errors import UnfitError

__all__ = ["CHECKS", "EXPERTS", "EXPERT_LIST", "ModuleOp", "NotedOp", "check_at", "noted_call"]

EXPERTS = "unisono.experts"  # stacked: called with (rows, indices of experts, weights)
EXPERT_LIST = "unisono.expert_list"  # a module around a list of experts: called with whole values

CHECK = "unisono.check"  # torch._check_tensor_all: a program goes on, or raises
CHECKS = (CHECK, "aten._assert_async")  # operators that return nothing, and are run for what they raise


class _Schema:
    arguments = ()


class NotedOp:
    """What a Node has as `op`, where PyTorch has an OpOverload.

    Args:
        name: such as "unisono.attention".
        run: what runs in a replay, on the arguments as they were noted.
    """

    tags = ()
    _schema = _Schema()

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.overloadpacket, self._run = name, run

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._run(*args, **named)


def check_at(line: str) -> NotedOp:
    """The operator of a check that the program makes at `line`: whether all elements are True."""

    def check(held: Tensor) -> None:
        if not held.item():
            raise UnfitError(f"a check of the model's own fails on this batch, at {line}")

    return NotedOp(CHECK, check)


class ModuleOp(NotedOp):
    """A call of a module. A replay gives it the module that is at `path` then.

    Its gradients are no sum of parts: on the tensor axis it takes whole ones, and gives whole ones.
    """

    def __init__(self, name: str, path: str, run: Callable[..., Any]) -> None:
        super().__init__(name, run)
        self.path = path


def noted_call(op: NotedOp, args: tuple[Any, ...], run: Callable[[], Tensor], flops: int = 0) -> Any:
    """Return `run()`; where a program is recorded, note it as the operator `op` with these arguments.

    Args:
        args: the first one is a tensor.
    """
    if has_torch_function(args[:1]):  # a mode is active
        return handle_torch_function(noted_call, args[:1], op, args, run, flops)
    return run()
