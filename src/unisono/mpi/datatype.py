"""`Datatype`: what lies where in a buffer. Named types are those of named_types.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.mpi import constants, layout
from unisono.mpi.attributes import HasAttributes
from unisono.mpi.darray import owned_indices
from unisono.mpi.errors import Exception, whole
from unisono.mpi.fortran_types import FortranTypes
from unisono.mpi.handle import Handle
from unisono.mpi.layout import Layout
from unisono.mpi.packing import Packing
from unisono.mpi.type_state import Type, codes

_COMBINERS = {
    number: name.removeprefix("COMBINER_")
    for name, number in vars(constants).items()
    if name.startswith("COMBINER_")
}
_F90 = tuple(number for number, name in _COMBINERS.items() if name.startswith("F90"))
_PREDEFINED = (constants.COMBINER_NAMED, constants.COMBINER_VALUE_INDEX, *_F90)


class Datatype(FortranTypes, HasAttributes, Packing, Handle):
    """The type of the items of a message."""

    _state: Any

    def _alive(self) -> Type:
        if self._state is None:
            raise Exception(constants.ERR_TYPE, "the datatype is null")
        return self._state

    # ---- what it is

    def Get_size(self) -> int:
        """Bytes of data in one item."""
        return self._alive().size

    def Get_extent(self) -> tuple[int, int]:
        """(lower bound, extent) in bytes."""
        where = self._alive().layout
        return where.lb, where.extent

    def Get_true_extent(self) -> tuple[int, int]:
        """(lower bound, extent) of the data, in bytes."""
        where = self._alive().layout
        return where.true_lb, where.true_extent

    size = property(lambda self: self.Get_size(), doc="Bytes of data in one item.")
    extent = property(lambda self: self.Get_extent()[1], doc="Bytes from one item to the next.")
    lb = property(lambda self: self.Get_extent()[0], doc="The lower bound in bytes.")
    ub = property(lambda self: sum(self.Get_extent()), doc="The upper bound in bytes.")
    true_extent = property(
        lambda self: self.Get_true_extent()[1], doc="Bytes from the first to the last of its data."
    )
    true_lb = property(lambda self: self.Get_true_extent()[0], doc="Where its data begins.")
    true_ub = property(lambda self: sum(self.Get_true_extent()), doc="Where its data ends.")

    def Get_name(self) -> str:
        """Its name."""
        return "MPI_DATATYPE_NULL" if self._state is None else self._state.name

    def Set_name(self, name: str) -> None:
        """Set its name."""
        self._alive().name = name

    name = property(Get_name, Set_name)

    def tocode(self) -> str:
        """The character, or string, of NumPy for a named type."""
        if self._state is None or self._state.code is None:
            raise ValueError(f"cannot map {self.Get_name() or 'a derived datatype'} to a type code")
        return self._state.code

    @classmethod
    def fromcode(cls, code: str) -> Datatype:
        """The named type of a character, or string, of NumPy."""
        try:
            found: Datatype = codes[code]
        except KeyError:
            raise ValueError(f"cannot map code {code!r} to MPI datatype") from None
        return cls(found)

    @property
    def typechar(self) -> str:
        """NumPy's character; "V": it has none."""
        dtype = None if self._state is None else self._state.dtype
        return "V" if dtype is None or self._state.code is None else dtype.char

    @property
    def typestr(self) -> str:
        """NumPy's kind and size."""
        if self._state is None:
            return ""
        code = self.typechar
        return f"V{self._state.extent}" if code == "V" else np.dtype(code).str[1:]

    # ---- new types of it

    def _make(self, where: Layout, combiner: int, **params: Any) -> Datatype:
        state = self._alive()
        made: Datatype = type(self)._of(Type(where, state.dtype, combiner, (state,), params))
        return made

    def Dup(self) -> Datatype:
        """The same type, with the attributes that are copied."""
        made = self._make(self._alive().layout, constants.COMBINER_DUP)
        made._state.code = self._state.code
        self._copy_all(made._state)
        return made

    Clone = Create_dup = Dup

    def Create_contiguous(self, count: int) -> Datatype:
        """`count` items."""
        one = self._alive().layout
        made = layout.repeated(one, _count(count), one.extent)
        return self._make(made, constants.COMBINER_CONTIGUOUS, count=count)

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Datatype:
        """`count` blocks, `stride` items apart."""
        one = self._alive().layout
        block = layout.repeated(one, _count(blocklength), one.extent)
        made = layout.repeated(block, _count(count), whole(stride, "stride") * one.extent)
        params = {"count": count, "blocklength": blocklength, "stride": stride}
        return self._make(made, constants.COMBINER_VECTOR, **params)

    def Create_hvector(self, count: int, blocklength: int, stride: int) -> Datatype:
        """`count` blocks, `stride` bytes apart."""
        one = self._alive().layout
        block = layout.repeated(one, _count(blocklength), one.extent)
        made = layout.repeated(block, _count(count), whole(stride, "stride"))
        params = {"count": count, "blocklength": blocklength, "stride": stride}
        return self._make(made, constants.COMBINER_HVECTOR, **params)

    def _blocks(self, lengths: Sequence[int], displacements: Sequence[int], unit: int) -> Layout:
        one = self._alive().layout
        return layout.joined(
            (at * unit, layout.repeated(one, _count(length), one.extent))
            for length, at in zip(lengths, displacements, strict=True)
        )

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Datatype:
        """Blocks of these lengths, displaced by items."""
        lengths, at = _lists(blocklengths, displacements)
        made = self._blocks(lengths, at, self._alive().extent)
        return self._make(made, constants.COMBINER_INDEXED, blocklengths=lengths, displacements=at)

    def Create_hindexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Datatype:
        """Blocks of these lengths, displaced by bytes."""
        lengths, at = _lists(blocklengths, displacements)
        made = self._blocks(lengths, at, 1)
        return self._make(made, constants.COMBINER_HINDEXED, blocklengths=lengths, displacements=at)

    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> Datatype:
        """Blocks of one length, displaced by items."""
        at = [whole(one, "displacement") for one in displacements]
        made = self._blocks([blocklength] * len(at), at, self._alive().extent)
        return self._make(made, constants.COMBINER_INDEXED_BLOCK, blocklength=blocklength, displacements=at)

    def Create_hindexed_block(self, blocklength: int, displacements: Sequence[int]) -> Datatype:
        """Blocks of one length, displaced by bytes."""
        at = [whole(one, "displacement") for one in displacements]
        made = self._blocks([blocklength] * len(at), at, 1)
        return self._make(made, constants.COMBINER_HINDEXED_BLOCK, blocklength=blocklength, displacements=at)

    @classmethod
    def Create_struct(
        cls, blocklengths: Sequence[int], displacements: Sequence[int], datatypes: Sequence[Datatype]
    ) -> Datatype:
        """Blocks of these lengths and types, displaced by bytes."""
        lengths, at = _lists(blocklengths, displacements)
        types = [one._alive() for one in datatypes]
        if len(types) != len(lengths):
            raise ValueError(f"expecting {len(lengths)} items, got {len(types)}")
        made = layout.padded(
            layout.joined(
                (shift, layout.repeated(one.layout, _count(length), one.extent))
                for length, shift, one in zip(lengths, at, types, strict=True)
            )
        )
        alike = {one.dtype for one in types}
        params = {"blocklengths": lengths, "displacements": at, "datatypes": list(datatypes)}
        dtype = alike.pop() if len(alike) == 1 else None
        state = Type(made, dtype, constants.COMBINER_STRUCT, tuple(types), params)
        result: Datatype = cls._of(state)
        return result

    def Create_subarray(
        self,
        sizes: Sequence[int],
        subsizes: Sequence[int],
        starts: Sequence[int],
        order: int = constants.ORDER_C,
    ) -> Datatype:
        """A part of an array."""
        one = self._alive().layout
        sizes, subsizes, starts = (
            [whole(i, "an extent") for i in each] for each in (sizes, subsizes, starts)
        )
        if not len(sizes) == len(subsizes) == len(starts):
            raise ValueError(f"expecting {len(sizes)} items in sizes, subsizes and starts")
        if any(b < 1 or s < 0 or s + b > n for n, b, s in zip(sizes, subsizes, starts, strict=True)):
            raise Exception(constants.ERR_ARG, f"part {subsizes} at {starts} of an array {sizes}")
        made, shift, step = one, 0, one.extent
        axes = list(zip(sizes, subsizes, starts, strict=True))
        for size, part, start in reversed(axes) if order == constants.ORDER_C else axes:
            made = layout.repeated(made, part, step)
            shift += start * step
            step *= size
        made = layout.joined([(shift, made)]).resized(0, step)
        params = {"sizes": sizes, "subsizes": subsizes, "starts": starts, "order": order}
        return self._make(made, constants.COMBINER_SUBARRAY, **params)

    def Create_darray(
        self,
        size: int,
        rank: int,
        gsizes: Sequence[int],
        distribs: Sequence[int],
        dargs: Sequence[int],
        psizes: Sequence[int],
        order: int = constants.ORDER_C,
    ) -> Datatype:
        """The part that `rank` has of an array that is distributed over a grid of `size` ranks."""
        one = self._alive().layout
        made, step = one, one.extent
        axes = owned_indices(size, rank, gsizes, distribs, dargs, psizes)
        pairs = list(zip(gsizes, axes, strict=True))
        for length, mine in reversed(pairs) if order == constants.ORDER_C else pairs:
            made = layout.joined((index * step, made) for index in mine)
            step *= length
        params = {
            "size": size, "rank": rank, "gsizes": list(gsizes), "distribs": list(distribs),
            "dargs": list(dargs), "psizes": list(psizes), "order": order,
        }  # fmt: skip
        return self._make(made.resized(0, step), constants.COMBINER_DARRAY, **params)

    def Create_resized(self, lb: int, extent: int) -> Datatype:
        """The same data with other bounds."""
        made = self._alive().layout.resized(whole(lb, "lb"), whole(extent, "extent"))
        return self._make(made, constants.COMBINER_RESIZED, lb=lb, extent=extent)

    Resized = Create_resized

    def Commit(self) -> Datatype:
        """Returns itself: a type is ready once it is made."""
        self._alive()
        return self

    def _release(self) -> None:
        self.Free()

    def Free(self) -> None:
        """Release it."""
        self._alive()
        if self._constant() is not None:
            raise Exception(constants.ERR_TYPE, f"{self.name} is predefined")
        self._delete_all()
        self._state = None

    # ---- how it was made

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        """(number of integers, addresses, counts and datatypes in `Get_contents`, combiner)."""
        integers, addresses, counts, types = self._contents()
        return len(integers), len(addresses), len(counts), len(types), self._alive().combiner

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        """(integers, addresses, counts, datatypes) from which it was made."""
        if self._alive().combiner == constants.COMBINER_NAMED:
            raise Exception(constants.ERR_TYPE, "a named datatype has no contents")
        return self._contents()

    def _contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        state = self._alive()
        integers, addresses = _numbers_of(state)
        return integers, addresses, [], [Datatype._of(one) for one in state.types]

    def decode(self) -> tuple[Datatype, str, dict[str, Any]]:
        """(base type, combiner, the arguments that made it of the base type)."""
        state = self._alive()
        if state.combiner == constants.COMBINER_NAMED:
            return self, "NAMED", {}
        base = DATATYPE_NULL if state.combiner == constants.COMBINER_STRUCT else None
        if base is None:
            base = Datatype._of(state.types[0]) if state.types else DATATYPE_NULL
        params = dict(state.params)
        if "datatypes" in params:  # the caller may free them
            params["datatypes"] = [Datatype._of(one) for one in state.types]
        return base, _COMBINERS[state.combiner], params

    envelope = property(Get_envelope)
    contents = property(Get_contents)
    combiner = property(lambda self: self._alive().combiner, doc="How it was made.")
    is_named = property(
        lambda self: self._alive().combiner == constants.COMBINER_NAMED, doc="Whether it is a named type."
    )
    is_predefined = property(
        lambda self: self._state is None or self._state.combiner in _PREDEFINED,
        doc="Whether no program has made it.",
    )

    def __reduce__(self) -> Any:
        if self._constant() is not None:
            return super().__reduce__()
        base, combiner, params = self.decode()
        return _create, (base, combiner, params)


def _create(base: Datatype, combiner: str, params: dict[str, Any]) -> Datatype:
    """A type that was pickled."""
    if combiner == "DUP":
        return base.Dup()
    made: Datatype = getattr(base, f"Create_{combiner.lower()}")(**params)
    return made.Commit()


def _numbers_of(state: Type) -> tuple[list[int], list[int]]:
    """The integers and addresses of `Get_contents`."""
    params, name = dict(state.params), _COMBINERS[state.combiner]
    params.pop("datatypes", None)
    if name == "HVECTOR":
        return [params["count"], params["blocklength"]], [params["stride"]]
    if name == "RESIZED":
        return [], [params["lb"], params["extent"]]
    lengths, at = params.get("blocklengths", []), params.get("displacements", [])
    if name == "INDEXED":
        return [len(lengths), *lengths, *at], []
    if name in ("HINDEXED", "STRUCT"):
        return [len(lengths), *lengths], at
    if name == "INDEXED_BLOCK":
        return [len(at), params["blocklength"], *at], []
    if name == "HINDEXED_BLOCK":
        return [len(at), params["blocklength"]], at
    integers: list[int] = [len(params["sizes"])] if name == "SUBARRAY" else []
    for key, value in params.items():
        integers += [len(value), *value] if key == "gsizes" else value if isinstance(value, list) else [value]
    return integers, []


def _count(value: Any) -> int:
    number = whole(value, "count")
    if number < 0:
        raise Exception(constants.ERR_ARG, f"a count is {number}")
    return number


def _lists(lengths: Sequence[int], displacements: Sequence[int]) -> tuple[list[int], list[int]]:
    lengths, at = [_count(one) for one in lengths], [whole(one, "displacement") for one in displacements]
    if len(lengths) != len(at):
        raise ValueError(f"expecting {len(lengths)} items, got {len(at)}")
    return lengths, at


DATATYPE_NULL = Datatype()
