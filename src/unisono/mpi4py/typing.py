"""`mpi4py.typing`: the types of arguments, for annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, SupportsIndex

from unisono import MPI

__all__ = [
    "Aint", "Bottom", "BufSpec", "BufSpecB", "BufSpecV", "BufSpecW", "Buffer", "Count", "Displ", "InPlace",
    "Offset", "SupportsBuffer", "SupportsCAI", "SupportsDLPack", "TargetSpec", "TypeSpec",
]  # fmt: skip


class SupportsBuffer(Protocol):
    """An object with Python's buffer protocol."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Its memory."""


class SupportsDLPack(Protocol):
    """An object with DLPack."""

    def __dlpack__(self, /, *, stream: Any = None) -> object:
        """Its memory, as a capsule."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """(kind, number) of its device."""


class SupportsCAI(Protocol):
    """An object with the array interface of CUDA."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Its memory."""


Buffer = SupportsBuffer | SupportsDLPack | SupportsCAI
Bottom = MPI.BottomType | None
InPlace = MPI.InPlaceType | None
Aint = SupportsIndex
Count = SupportsIndex
Displ = SupportsIndex
Offset = SupportsIndex
Datatype = MPI.Datatype
TypeSpec = Datatype | str

_Counts = Sequence[SupportsIndex]
_Types = Sequence[Datatype]
_Places = tuple[_Counts, _Counts]  # (counts, displacements)
BufSpecB = (
    Buffer | tuple[Buffer, Count] | tuple[Buffer, TypeSpec] | tuple[Buffer, Count, TypeSpec] | list[Any]
)
BufSpec = BufSpecB | tuple[Bottom, Count, Datatype]
BufSpecV = (
    Buffer | tuple[Buffer, _Counts] | tuple[Buffer, _Places] | tuple[Buffer, TypeSpec]
    | tuple[Buffer, _Counts, TypeSpec] | tuple[Buffer, _Places, TypeSpec]
    | tuple[Buffer, _Counts, _Counts, TypeSpec] | tuple[Bottom, _Places, Datatype]
    | tuple[Bottom, _Counts, _Counts, Datatype] | list[Any]
)  # fmt: skip
BufSpecW = (
    tuple[Buffer, _Types] | tuple[Buffer, _Places, _Types] | tuple[Buffer, _Counts, _Counts, _Types]
    | tuple[Bottom, _Places, _Types] | tuple[Bottom, _Counts, _Counts, _Types] | list[Any]
)  # fmt: skip
TargetSpec = (
    Displ | tuple[()] | tuple[Displ] | tuple[Displ, Count] | tuple[Displ, Count, TypeSpec] | list[Any]
)
