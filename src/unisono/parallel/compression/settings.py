"""What a plan says of compression: an interface of data. `choices` has the two ways of compressing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from unisono.codecs import Codec

__all__ = ["EXACT", "Choice", "CompressionSettings", "LowRankOptions", "Rule"]

EXACT = "exact"
Choice = int | Codec | str
Rule = Mapping[str, Choice] | Callable[[str, Sequence[int]], Choice]


class LowRankOptions(NamedTuple):
    """How factors of low rank are sent.

    Attributes:
        codec: None: in f32.  warm_start: a step begins with the factor of the last one.  seed: of the first.
    """

    codec: Codec | None = None
    warm_start: bool = True
    seed: int = 0


class CompressionSettings(ABC):
    """The common part of both ways of compressing.

    Attributes:
        feedback: errors are sent later.  errors: the format in which they are kept, "f32" or "1-6-9".
        start: steps at the beginning that send gradients exactly.
    """

    feedback: bool
    errors: str
    start: int

    @property
    def low_rank(self) -> LowRankOptions:
        """How factors are sent, where a choice is a rank."""
        return LowRankOptions()

    @abstractmethod
    def choice(self, name: str, shape: Sequence[int]) -> Choice:
        """What becomes of a parameter's gradient: a rank, a codec, or "exact"."""
