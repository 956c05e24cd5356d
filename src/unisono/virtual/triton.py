"""Triton on virtual GPUs: its own interpreter runs the kernels, one program after another, in Python."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from unisono.torch_internals.dynamo import ends_graphs

from .environment import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

PROPERTIES = {
    "max_shared_mem": "shared_memory_per_block_optin", "max_num_regs": "regs_per_multiprocessor",
    "multiprocessor_count": "multi_processor_count", "warpSize": "warp_size",
    "sm_clock_rate": "clock_rate", "mem_clock_rate": "memory_clock_rate", "mem_bus_width": "memory_bus_width",
}  # fmt: skip
NOT_INTERPRETED = (
    "a virtual GPU compiles no Triton kernels: set TRITON_INTERPRET=1 before Triton is imported, which "
    f"interprets them. {PAGE}"
)
_SAID: list[str] = []


def install(module: ModuleType) -> None:
    """Prepare Triton, which has just been imported."""
    module.runtime.driver.set_active(_VirtualDriver())
    if module.knobs.runtime.interpret:
        from triton.runtime import autotuner, interpreter  # type: ignore[import-untyped,import-not-found,unused-ignore]

        ends_graphs(interpreter.InterpretedFunction, autotuner.Autotuner, autotuner.Heuristics)
        interpreter.GridExecutor.__call__ = _with_a_word(interpreter.GridExecutor.__call__)


def _with_a_word(run: Callable[..., Any]) -> Callable[..., Any]:
    """Say at the first kernel that it takes long."""

    @functools.wraps(run)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _SAID:
            _SAID.append(self.fn.__name__)
            text = "unisono: Triton kernels are interpreted on virtual GPUs, which is slow; the first:"
            print(text, _SAID[0], file=sys.stderr)
        from .graphs import as_one_step  # PyTorch may import Triton before it is complete

        return as_one_step(run, (self, *args), kwargs)

    return called


class _VirtualDriver:
    """What Triton asks a driver: the properties of the devices. It runs no compiled kernels."""

    def __init__(self) -> None:
        self.utils = self

    def get_current_target(self) -> Any:
        from triton.backends.compiler import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
            GPUTarget,
        )

        return GPUTarget("cuda", 80, 32)

    def get_active_torch_device(self) -> Any:
        return torch.device("cuda", torch.cuda.current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_device_properties(self, device: int) -> dict[str, int]:
        seen: Any = torch.cuda.get_device_properties(device)
        return {ours: getattr(seen, name) for ours, name in PROPERTIES.items()}

    def get_benchmarker(self) -> Callable[..., list[float]]:  # autotuning takes the first configuration
        return lambda kernel, *, quantiles=(0.5,), **settings: [0.0] * len(quantiles)  # noqa: ARG005

    def get_current_device(self) -> int:  # for a kernel that is not interpreted
        raise RuntimeError(NOT_INTERPRETED)
