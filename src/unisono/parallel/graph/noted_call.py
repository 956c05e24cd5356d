"""A call that a recorded program has as one operator, whatever PyTorch makes of it.

PyTorch makes other operators of scaled_dot_product_attention by device, mask and dropout; one that is cut
must be known as what it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import handle_torch_function, has_torch_function

from unisono.errors import UnfitError

EXPERTS = "unisono.experts"  # stacked: called with (rows, indices of experts, weights)
EXPERT_LIST = "unisono.expert_list"  # a module around a list of experts: called with whole values

GATHERED = "unisono.whole"  # what up.shard has left in parts, whole

CHECK = "unisono.check"  # torch._check_tensor_all: a program goes on, or raises
CHECKS = (CHECK, "aten._assert_async")  # operators that return nothing, and are run for what they raise


class _Schema:
    arguments = ()


class NotedOp:
    """What a Node has as `op`, where PyTorch has an OpOverload."""

    tags = ()
    _schema = _Schema()

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.overloadpacket, self._run = name, run

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._run(*args, **named)


def left_in_parts(nodes: Iterable[Any], outputs: Iterable[int]) -> str:
    """Where a program takes a value in parts as if it were whole, and what to write; "": nowhere."""
    parts, why = set[int](), "a value that up.shard has left in parts: make it whole by up.whole(...)"
    for node in nodes:
        taken = {*node.taken}
        if isinstance(node.op, PartsOp):
            parts.update(node.made)
        elif not parts.isdisjoint(taken) and node.name != GATHERED:
            if taken - parts or torch.Tag.nondeterministic_seeded in node.op.tags:
                return f"{node.name} takes {why}, or shard this operator, too, at {node.line}"
            if getattr(node.op._schema, "is_mutable", False):  # DTensor may write into a copy
                return f"{node.name} writes into {why}, at {node.line}"
            parts.update(node.made)
    return "" if parts.isdisjoint(outputs) else f"the model returns {why}"


def check_at(line: str) -> NotedOp:
    """The operator of a check that the program makes at `line`: whether all elements are True."""

    def check(held: Tensor) -> None:
        if not held.item():
            raise UnfitError(f"a check of the model's own fails on this batch, at {line}")

    return NotedOp(CHECK, check)


class WholeOp(NotedOp):
    """Its gradients are no sum of parts: on the tensor axis it takes whole ones, and gives whole ones."""


class PartsOp(WholeOp):
    """What it makes is in parts over the tensor axis, until it is made whole. While a program is recorded,
    `recorded` makes the whole value and counts its floating-point operations.
    """

    def __init__(self, name: str, run: Callable[..., Any], recorded: Callable[[], Any]) -> None:
        super().__init__(name, run)
        self.recorded = recorded


class ModuleOp(WholeOp):
    """A call of a module. A replay gives it the module that is at `path` then."""

    def __init__(self, name: str, path: str, run: Callable[..., Any]) -> None:
        super().__init__(name, run)
        self.path = path


def noted_call(op: NotedOp, args: tuple[Any, ...], run: Callable[[], Tensor], flops: int = 0) -> Any:
    """Return `run()`; where a program is recorded, note it as the operator `op` with these arguments."""
    if has_torch_function(args[:1]):  # a mode is active
        return handle_torch_function(noted_call, args[:1], op, args, run, flops)
    return run()


# ---- scaled_dot_product_attention ----


FUNCTION = "scaled_dot_product_attention"
DEFAULTS: dict[str, Any] = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False,
    "scale": None, "enable_gqa": False,
}  # fmt: skip


def bound(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    return DEFAULTS | dict(zip(DEFAULTS, args, strict=False)) | named


@contextlib.contextmanager
def calls_told(tell: Callable[[Any, Any, Any], Any] | None) -> Iterator[None]:
    """Tell of calls that PyTorch's own layers make, too: no function mode is told of them."""
    function: Any = getattr(functional, FUNCTION)
    if tell is not None:
        setattr(functional, FUNCTION, lambda *args, **named: tell(function, args, named))
    try:
        yield
    finally:
        setattr(functional, FUNCTION, function)


ATTENTION: Any = NotedOp("unisono.attention", functional.scaled_dot_product_attention)


# ---- on a GPU ----


def gpu_attention(*, on_gpu: bool) -> contextlib.AbstractContextManager[None]:
    """Calls of `scaled_dot_product_attention` run the operators of a GPU's."""
    return calls_told(_call if on_gpu else None)


def _call(function: Callable[..., Any], args: Any, named: Any) -> Any:
    call = bound(args, named)
    query, key = call["query"], call["key"]
    if query.dim() != 4:
        return function(*args, **named)
    if query.dtype == torch.float32 and query.shape[1] != key.shape[1]:
        with sdpa_kernel(SDPBackend.MATH):
            return function(**call)
    return function(**{**call, "dropout_p": 0.0})
