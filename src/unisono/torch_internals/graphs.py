"""Private names that recording the operations of a CUDA graph needs."""

from __future__ import annotations

from typing import Any

from .fake import OperatorMode, address_of
from .probe import PrivateName, need

__all__ = ["NAMES", "OperatorMode", "address_of", "owners", "without_modes"]

WITHOUT = "torch.cuda.CUDAGraph does not run on virtual GPUs"
NAMES = {
    "owners": PrivateName(
        "torch._C:_storage_Use_Count", purpose="free what only a CUDA graph refers to", without=WITHOUT
    ),
    "without": PrivateName(
        "torch.utils._python_dispatch:_disable_current_modes",
        purpose="record a collective as one step of a CUDA graph",
        without=WITHOUT,
    ),
}


def owners(storage: Any) -> int:
    """How many tensors and objects refer to a storage, its Python object included."""
    return int(need(NAMES["owners"])(address_of(storage)))


def without_modes() -> Any:
    """A context in which operations are seen by no mode."""
    return need(NAMES["without"])()
