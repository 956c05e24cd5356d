"""Triton kernels within torch.compile: a graph ends before one, which runs as it does without a graph."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def install(module: ModuleType) -> None:
    """End a graph where a program starts a Triton kernel.

    Args:
        module: `torch._higher_order_ops.triton_kernel_wrap`, which has just been imported.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
        self.raise_unsupported("virtual GPUs interpret Triton kernels, which are no part of a graph")

    module.TritonHOPifier.call_triton_kernel = call
