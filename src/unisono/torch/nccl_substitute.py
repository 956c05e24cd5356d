"""What takes NCCL's place in this process, if anything does. Virtual GPUs install it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class NcclSubstitute(NamedTuple):
    """Takes CUDA tensors.

    Attributes:
        group: makes a process group from (store, rank, size, timeout, name), and devices=, backend=,
            parent_ranks=; one named "gloo" has no limits of NCCL.
        on_host: the same memory as a CPU tensor.
    """

    group: Callable[..., Any]
    on_host: Callable[[Tensor], Tensor]


_INSTALLED: list[NcclSubstitute] = []  # one at most: PyTorch itself can have only one set of devices


def install(stand_in: NcclSubstitute) -> None:
    """Pass CUDA tensors to `stand_in` from now on."""
    _INSTALLED[:] = [stand_in]


def current() -> NcclSubstitute | None:
    """The stand-in of this process."""
    return _INSTALLED[0] if _INSTALLED else None
