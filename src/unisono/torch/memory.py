"""Memory of tensors: that other ranks of a host read in place, see `unisono.empty`; that tensors share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

import unisono


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new CPU tensor, as from `torch.empty`, that collectives of any group read without a copy.

    Example: `flat = unisono.torch.empty(model_numel, dtype=torch.bfloat16)`

    Args:
        size: the lengths of the axes, one by one or as a sequence.  dtype: PyTorch's default, if not given.
    Raises:
        TypeError: collectives do not know the dtype: quantized ones.  MemoryError: not enough memory.
    """
    lengths = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    shape = torch.Size(lengths)  # type: ignore[arg-type]
    from unisono.engine.memory.buffers import DTYPES  # not at every `import torch`

    wanted = dtype or torch.get_default_dtype()
    if str(wanted).removeprefix("torch.") not in DTYPES:
        raise TypeError(f"a tensor of {wanted} has a scale and a zero point; make one of its int_repr()")
    if not shape.numel():
        return torch.empty(shape, dtype=wanted)
    memory = unisono.empty(shape.numel() * wanted.itemsize, "uint8")
    return torch.frombuffer(memory, dtype=wanted).view(shape)


def share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two elements of these tensors, or of one of them, lie at one place in memory.

    Example: x of shape [1, 3].expand(4, 3) does; the columns of a matrix do not
    """
    if len({(x.shape, x.stride(), x.dtype) for x in tensors}) == 1:  # as one tensor with one more axis
        places = sorted(x.data_ptr() for x in tensors)
        steps = {high - low for low, high in pairwise(places)}
        if len(steps) <= 1 and _nested([*_axes(tensors[0]), *((len(tensors), step) for step in steps)]):
            return False
    return any(_meet(cluster) for cluster in _clusters(tensors))


def _axes(x: torch.Tensor) -> list[tuple[int, int]]:
    """The length and the distance in bytes of each axis; the bytes of an element are one, too."""
    return [(x.itemsize, 1), *((n, step * x.itemsize) for n, step in zip(x.shape, x.stride(), strict=True))]


def _nested(axes: list[tuple[int, int]]) -> bool:
    """Whether each axis steps over all that the axes with smaller steps reach: then no byte is met twice."""
    reach = 0
    for length, step in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
        if step <= reach:
            return False
        reach += (length - 1) * step
    return True


def _end(x: torch.Tensor) -> int:
    """The address behind its last element."""
    return x.data_ptr() + 1 + sum((length - 1) * step for length, step in _axes(x))


def _clusters(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors that have elements, together with those whose first and last bytes enclose theirs."""
    clusters: list[list[torch.Tensor]] = []
    end = 0
    for x in sorted((x for x in tensors if x.numel()), key=torch.Tensor.data_ptr):
        if x.data_ptr() >= end:
            clusters.append([])
        clusters[-1].append(x)
        end = max(end, _end(x))
    return clusters


def _meet(cluster: list[torch.Tensor]) -> bool:
    """Whether a byte of these tensors belongs to two elements: each marks its bytes."""
    if len(cluster) == 1 and _nested(_axes(cluster[0])):
        return False
    low, high = cluster[0].data_ptr(), max(map(_end, cluster))
    marks = torch.zeros(high - low, dtype=torch.bool)
    for x in cluster:
        axes = [axis for axis in _axes(x) if axis[1]]
        marks.as_strided(*zip(*axes, strict=True), x.data_ptr() - low).fill_(True)
    return int(marks.sum()) < sum(x.numel() * x.itemsize for x in cluster)
