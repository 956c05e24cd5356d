"""Private names that `unisono.parallel.graph` uses: tensors with shapes and without values."""

from __future__ import annotations

from typing import Any

from .probe import Private, find, need

__all__ = ["NAMES", "fake_mode", "is_about_data"]

NAMES = {
    "mode": Private(
        "torch._subclasses.fake_tensor:FakeTensorMode",
        purpose="run a model on shapes, without values",
        without="up.capture cannot run, and a tensor plan needs cuts=",
    ),
    "value": Private(
        "torch._subclasses.fake_tensor:DataDependentOutputException",
        purpose="tell a model that reads values from one that raises",
        without="the error of such a model does not say so",
    ),
    "shape": Private(
        "torch._subclasses.fake_tensor:DynamicOutputShapeException",
        purpose="tell a model whose shapes depend on values from one that raises",
        without="the error of such a model does not say so",
    ),
}


def fake_mode() -> Any:
    """Make a mode under which every new tensor has a shape and no values."""
    return need(NAMES["mode"])(allow_non_fake_inputs=True)


def is_about_data(error: BaseException) -> bool:
    """Whether a model raised this because it reads the values of a tensor, which are not there."""
    kinds = tuple(kind for name in ("value", "shape") if (kind := find(NAMES[name])) is not None)
    return isinstance(error, kinds)
