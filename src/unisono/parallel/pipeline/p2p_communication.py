"""Tensors from stage to stage. Shapes are sent before the first message of a kind; then they are known.

A sender does not wait. A message is a tuple of tensors; tag 2 * stage is activations, tag 2 * stage + 1
gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from .schedule import StageMessage

TYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
TENSORS, DIMS = 64, 8  # the most that a header can hold


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class PipelineCommunicator:
    """The messages of one rank with the other ranks of its pipeline."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._known: dict[Hashable, tuple[TensorSpec, ...]] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, message: StageMessage, tensors: Sequence[Tensor], to: int, shape: Hashable) -> None:
        """Send activations. `shape`: the key of their shapes, equal at both ends.

        Raises:
            ValueError: equal inputs gave other shapes than before, or a message has too many tensors.
        """
        specs = tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        key = _kind(message, shape)
        if key not in self._known:
            self._known[key] = specs
            self._post(_header(specs, self._device), to, message)
        elif self._known[key] != specs:
            raise ValueError(
                f"stage {message.stage} returned {specs} where it returned {self._known[key]} for inputs "
                "of the same shapes; a stage's shapes must follow from those of its inputs"
            )
        self.send_known(message, tensors, to)

    def recv(self, message: StageMessage, source: int, shape: Hashable) -> tuple[Tensor, ...]:
        """Receive activations; those that gradients go back to require them."""
        key = _kind(message, shape)
        if key not in self._known:
            header = torch.empty(1 + TENSORS * (3 + DIMS), dtype=torch.int64, device=self._device)
            dist.recv(header, source, group=self._group, tag=_tag(message))
            self._known[key] = _read(header)
        specs = self._known[key]
        tensors = self.recv_known(message, specs, source)
        return tuple(t.requires_grad_(spec.requires_grad) for t, spec in zip(tensors, specs, strict=True))

    def send_known(self, message: StageMessage, tensors: Sequence[Tensor], to: int) -> None:
        """Send tensors whose shapes the receiver knows."""
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        for tensor in tensors:
            self._post(_real(tensor.detach().resolve_conj().contiguous()), to, message)

    def recv_known(
        self, message: StageMessage, specs: Sequence[TensorSpec], source: int
    ) -> tuple[Tensor, ...]:
        """Receive tensors of known shapes."""
        tensors = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs)
        for tensor in tensors:
            dist.recv(_real(tensor), source, group=self._group, tag=_tag(message))
        return tensors

    def expect(self, message: StageMessage, shape: Hashable, specs: tuple[TensorSpec, ...]) -> None:
        """Know the shapes of activations, which are not sent then."""
        self._known[_kind(message, shape)] = specs

    def forget(self) -> None:
        """Tell shapes anew. Both ends call this between two steps."""
        self._known.clear()

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _post(self, tensor: Tensor, to: int, message: StageMessage) -> None:
        work = dist.isend(tensor, to, group=self._group, tag=_tag(message))
        assert work is not None
        self._sent.append((work, tensor))


def _kind(message: StageMessage, shape: Hashable) -> Hashable:
    """What equal shapes belong to."""
    return message.kind, message.stage, shape, torch.is_grad_enabled()


def _real(tensor: Tensor) -> Tensor:
    """The memory of a complex tensor as real numbers, which every backend sends."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _tag(message: StageMessage) -> int:
    return 2 * message.stage + (message.kind == "B")


def _header(specs: tuple[TensorSpec, ...], device: torch.device) -> Tensor:
    if len(specs) > TENSORS or any(len(spec.shape) > DIMS for spec in specs):
        raise ValueError(
            f"a stage may return up to {TENSORS} tensors of up to {DIMS} dimensions, not {specs}"
        )
    numbers = [len(specs)]
    for spec in specs:
        numbers += [TYPES.index(spec.dtype), int(spec.requires_grad), len(spec.shape), *spec.shape]
        numbers += [0] * (DIMS - len(spec.shape))
    numbers += [0] * (1 + TENSORS * (3 + DIMS) - len(numbers))
    return torch.tensor(numbers, device=device)


def _read(header: Tensor) -> tuple[TensorSpec, ...]:
    numbers = [int(number) for number in header.tolist()]
    rows = [numbers[1 + i * (3 + DIMS) : 1 + (i + 1) * (3 + DIMS)] for i in range(numbers[0])]
    return tuple(TensorSpec(tuple(row[3 : 3 + row[2]]), TYPES[row[0]], bool(row[1])) for row in rows)
