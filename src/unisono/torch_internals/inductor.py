"""Where Inductor compiles one graph, and what it must not do for devices that are in host memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from .probe import PrivateName, find, need

WITHOUT = "on virtual GPUs torch.compile needs backend='aot_eager'"

NAMES = {
    "compile": PrivateName(
        "torch._inductor.compile_fx:_compile_fx_inner", purpose="compile a graph for the CPU", without=WITHOUT
    ),
    "has": PrivateName(
        "torch._C:_dispatch_has_computed_kernel_for_dispatch_key",
        purpose="tell whether the CPU has the operations of a graph",
        without=WITHOUT,
    ),
    "tracing": PrivateName(
        "torch._functorch.config", purpose="keep out graphs that were cached for real GPUs", without=WITHOUT
    ),
    "lowering": PrivateName("torch._inductor.config", purpose="measure no kernels of GPUs", without=WITHOUT),
    "devices": PrivateName(
        "torch.fx.passes.fake_tensor_prop:FakeTensorProp", purpose="move a graph to the CPU", without=WITHOUT
    ),
}

NAMES["ahead"] = PrivateName(
    "torch._inductor.virtualized:V", purpose="tell AOTInductor from torch.compile", without=WITHOUT
)
NAMES["python"] = PrivateName(
    "torch.library:_impls",
    purpose="leave kernels of libraries that are written in Python in their place",
    without="a library's kernels for CUDA in Python do not run on virtual GPUs where it has one for the CPU",
)

SETTINGS = {
    "tracing": {"enable_autograd_cache": False, "graphsafe_rng_functionalization": False},
    "lowering": {"shape_padding": False, "pipeline_max_autotune_gemm": False},
}


def compile_through(module: ModuleType, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap(f)` in the place of Inductor's `f(graph, inputs, **settings)`, which compiles one graph.

    Args:
        module: `torch._inductor.compile_fx`, which has just been imported.
    Raises:
        MissingPrivateName: this PyTorch compiles in another way.
    """
    compile_one = need(NAMES["compile"])
    for name, values in SETTINGS.items():
        config: Any = need(NAMES[name])
        for key, value in values.items():
            if hasattr(config, key):  # versions differ
                setattr(config, key, value)
    module._compile_fx_inner = wrap(compile_one)  # type: ignore[attr-defined]


def compiles_ahead() -> bool:
    """Whether Inductor makes a library for other programs, and not a graph of this one."""
    return bool(need(NAMES["ahead"]).aot_compilation)


def propagate(graph: Any, mode: Any, inputs: Iterable[Any]) -> None:
    """Compute the shapes, types and devices of all nodes of a graph anew, from those of its inputs."""
    need(NAMES["devices"])(graph, mode).propagate_dont_convert_inputs(*inputs)


def without_cpu_kernel(operations: Iterable[Any]) -> list[str]:
    """Return the names of the operations that the CPU does not have."""
    has, getter = need(NAMES["has"]), operator.methodcaller("name")
    return sorted({name for name in map(getter, operations) if not has(name, "CPU")})


def kernels_in_python() -> str:
    """Return the operations with a kernel for CUDA in Python: " space::name space::name "."""
    names = (key.split("/") for key in find(NAMES["python"]) or ())
    return " ".join(
        ["", *(f"{space}::{name.split('.')[0]}" for space, name, key in names if key == "CUDA"), ""]
    )
