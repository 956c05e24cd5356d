"""What a rank keeps of one parameter between steps: its error buffer, and where PowerSGD begins."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono import codecs

from .settings import Choice

_F169 = codecs.f169
_LARGEST = 1023 * 2.0**22  # of 1-6-9: the value of a larger error, instead of infinity


class CompressionState:
    """The state of one parameter.

    Attributes:
        name: of the parameter.  shape: of this rank's part of it.
        choice: "exact", a codec, or a rank.
        error: the error buffer, of `shape`: f32, or int16 with the bits of 1-6-9; None: empty.
        factor: PowerSGD's Q^T [rank, m], orthonormal; None: not begun.
    """

    def __init__(
        self, name: str, shape: Sequence[int], choice: Choice, *, feedback: bool, errors: str, seed: int
    ) -> None:
        self.name, self.shape, self.choice = name, torch.Size(shape), choice
        self.error: Tensor | None = None
        self.factor: Tensor | None = None
        self._before: tuple[Tensor | None, Tensor | None] | None = None  # a step that may be undone
        self._feedback, self._seed = feedback, seed
        self.dtype = torch.float32 if errors == "f32" else torch.int16

    @property
    def rank(self) -> int:
        """The rank of the factors; 0 where there are none."""
        return self.choice if isinstance(self.choice, int) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in (self.error, self.factor) if buffer is not None)

    @property
    def keeps(self) -> bool:
        """Whether there is error feedback."""
        return self._feedback and self.choice != "exact"

    def add_error(self, values: Tensor) -> None:
        """Add the error buffer. Shapes: values of as many elements as the parameter."""
        if self.error is not None:
            values.add_(self._decoded(self.error).view(values.shape))

    def room(self, values: Tensor) -> Tensor | None:
        """Return memory for a new error, in the shape of `values`; then call `keep`.

        In f32 this is the buffer itself. None: nothing is kept.
        """
        if not self.keeps:
            return None
        if self.error is None or (self._before is not None and self.error is self._before[0]):
            self.error = torch.zeros(self.shape, dtype=self.dtype)
        return self.error.view(values.shape) if self.dtype == torch.float32 else torch.empty_like(values)

    def keep(self, left: Tensor, step: int) -> None:
        """Store the error. 1-6-9 rounds it stochastically, so its mean is exact."""
        to = self.room(left)
        if to is None or self.error is None:
            return
        if self.dtype == torch.float32:
            if to.data_ptr() != left.data_ptr():
                to.copy_(left)
            return
        seed = self._seed * 0x9E3779B1 + zlib.crc32(f"{step} {self.name}".encode())
        within = left.clamp(-_LARGEST, _LARGEST)
        _F169.encode(within, self.error, rounding="stochastic", seed=seed & (2**64 - 1))

    def hold(self) -> None:
        """From the first call to `settle` leave the buffers as they are, and write others."""
        if self._before is None:
            self._before = self.error, self.factor

    def settle(self, *, undo: bool) -> None:
        """Take the new buffers for good, or have the old ones again."""
        if undo and self._before is not None:
            self.error, self.factor = self._before
        self._before = None

    def limit(self, most: float) -> None:
        """Clamp the error buffer to magnitudes of at most that; 1-6-9 encodes it again."""
        if self.error is not None:
            cut = torch.as_tensor(self._decoded(self.error)).nan_to_num(0.0).clamp_(-most, most)
            if self.dtype == torch.float32:
                self.error.copy_(cut.view(self.error.shape))
            else:
                _F169.encode(cut, self.error)

    def check(self, key: str, value: Tensor) -> None:
        """Look at a saved buffer."""
        if key == "error":
            shape, dtype = self.shape, self.dtype
        else:
            shape, dtype = torch.Size((self.rank, self.shape[1:].numel() if self.shape else 0)), torch.float32
        if value.shape != shape or value.dtype != dtype:
            raise ValueError(
                f"the saved {key} of {self.name!r} is {value.dtype} {list(value.shape)}, expected {dtype} "
                f"{list(shape)}: it is of another model, or of another compression"
            )

    def _decoded(self, error: Tensor) -> Tensor:
        return error if error.dtype == torch.float32 else _F169.decode(error)
