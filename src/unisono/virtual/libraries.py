"""Operations that other libraries bring, such as torchvision's: the CPU's kernel in the place of CUDA's.

They register when their shared library is loaded, which may be at any time.
"""

from __future__ import annotations

import functools
from importlib.machinery import ExtensionFileLoader
from typing import TYPE_CHECKING, Any

import torch

from unisono.torch_internals.inductor import kernels_in_python

from .cuda import KERNELS, refusal

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from .native import VirtualGpuLibrary


def watch(library: VirtualGpuLibrary) -> None:
    """Look for new operations whenever a shared library has been loaded, by an import or by PyTorch."""

    def followed(load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def loaded(*args: Any, **kwargs: Any) -> Any:
            made = load(*args, **kwargs)
            library.register_libraries(kernels_in_python().encode())
            return made

        return loaded

    loader: Any = ExtensionFileLoader
    operators: Any = torch.ops
    operators.load_library = followed(operators.load_library)
    loader.create_module = followed(loader.create_module)


def install(module: ModuleType) -> None:
    """Refuse to compile a library of CUDA code. `module`: torch.utils.cpp_extension."""
    asked = "_get_cuda_arch_flags" if module.CUDA_HOME else "_join_cuda_home"
    setattr(module, asked, refusal("a library of CUDA code", KERNELS))
