"""`Datatype`: what lies where in a buffer. Named types are those of named_types.py."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.mpi import constants, constructors
from unisono.mpi.attributes import HasAttributes
from unisono.mpi.buffers import bytes_of
from unisono.mpi.errors import Exception, exact, whole
from unisono.mpi.handle import Handle, HasName, getter
from unisono.mpi.layout import Layout, Type, codes, named


class Packing(Handle):
    """The methods of `Datatype` that pack."""

    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: Any) -> int:
        """Pack items behind `position`; returns the new position."""
        return self._pack(inbuf, outbuf, position, swap=False)

    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: Any) -> int:
        """Unpack items from `position` on; returns the new position."""
        return self._unpack(inbuf, position, outbuf, swap=False)

    def Pack_size(self, count: int, comm: Any) -> int:
        """The bytes that `count` items need."""
        return whole(count, "count") * self._alive().size

    def Pack_external(self, datarep: str, inbuf: Any, outbuf: Any, position: int) -> int:
        """See `Pack`. datarep: "external32": numbers have their highest byte first."""
        _check(datarep)
        return self._pack(inbuf, outbuf, position, swap=True)

    def Unpack_external(self, datarep: str, inbuf: Any, position: int, outbuf: Any) -> int:
        """See `Unpack`."""
        _check(datarep)
        return self._unpack(inbuf, position, outbuf, swap=True)

    def Pack_external_size(self, datarep: str, count: int) -> int:
        """See `Pack_size`."""
        _check(datarep)
        return whole(count, "count") * self._alive().size

    def _pack(self, inbuf: Any, outbuf: Any, position: int, *, swap: bool) -> int:
        state, raw, room = self._alive(), bytes_of(inbuf)[0], bytes_of(outbuf, writable=True)[0]
        packed = state.layout.pack(raw, 0, raw.size // state.extent if state.extent else 0)
        if position + packed.size > room.size:
            raise Exception(constants.ERR_TRUNCATE, f"{packed.size} bytes at {position} of {room.size}")
        room[position : position + packed.size] = state.swapped(packed) if swap else packed
        return position + packed.size

    def _unpack(self, inbuf: Any, position: int, outbuf: Any, *, swap: bool) -> int:
        state, raw, room = self._alive(), bytes_of(inbuf)[0], bytes_of(outbuf, writable=True)[0]
        end = position + (room.size // state.extent if state.extent else 0) * state.size
        if end > raw.size:
            raise Exception(constants.ERR_TRUNCATE, f"{end - position} bytes at {position} of {raw.size}")
        packed = raw[position:end]
        state.layout.unpack(state.swapped(packed) if swap else packed, room, 0)
        return end


def _check(datarep: str) -> None:
    if datarep != "external32":
        raise Exception(constants.ERR_ARG, f"there is no data representation {datarep!r}")


_COMBINERS = {
    number: name.removeprefix("COMBINER_")
    for name, number in vars(constants).items()
    if name.startswith("COMBINER_")
}
_F90 = tuple(number for number, name in _COMBINERS.items() if name.startswith("F90"))
_PREDEFINED = (constants.COMBINER_NAMED, constants.COMBINER_VALUE_INDEX, *_F90)
_CLASSES = {
    constants.TYPECLASS_INTEGER: "INTEGER", constants.TYPECLASS_REAL: "REAL",
    constants.TYPECLASS_COMPLEX: "COMPLEX", constants.TYPECLASS_LOGICAL: "LOGICAL",
}  # fmt: skip
_DIGITS = ((2, "INTEGER1"), (4, "INTEGER2"), (9, "INTEGER4"), (18, "INTEGER8"))
_PAIRED = ("SHORT", "INT", "LONG", "FLOAT", "DOUBLE", "LONG_DOUBLE")


def _constructor(where: Callable[..., Layout]) -> Any:
    """A method `Create_...` of Datatype. where: makes the layout from that of the old type, and arguments."""
    signature = inspect.signature(where)
    names = list(signature.parameters)[1:]
    combiner = getattr(constants, f"COMBINER_{where.__name__.upper()}")

    @functools.wraps(where)
    def create(self: Datatype, *args: Any, **options: Any) -> Datatype:
        state = self._alive()
        if options or len(args) != len(names):
            given = signature.bind(state.layout, *args, **options)
            given.apply_defaults()
            args = given.args[1:]
        params = {name: _checked(name, value) for name, value in zip(names, args, strict=True)}
        return self._made(where(state.layout, **params), state.dtype, combiner, (state,), params)

    create.__name__, create.__qualname__ = f"Create_{where.__name__}", f"Datatype.Create_{where.__name__}"
    return create


def _checked(name: str, value: Any) -> Any:
    """An integer argument; those whose names are plural are lists.

    Raises:
        TypeError: it is none.  Exception: it is a negative count.
    """
    if name.endswith("s"):
        return [_checked(name[:-1], exact(one, name)) for one in value]
    number = whole(value, name)
    if number < 0 and name in ("count", "blocklength"):
        raise Exception(constants.ERR_ARG, f"a {name} is {number}")
    return number


class Datatype(HasAttributes, HasName, Packing, Handle):
    """The type of the items of a message."""

    _null = constants.ERR_TYPE
    # ---- what it is

    Get_size, size = getter("Bytes of data in one item.", lambda state: state.size)

    def Get_extent(self) -> tuple[int, int]:
        """(lower bound, extent) in bytes."""
        where = self._alive().layout
        return where.lb, where.extent

    def Get_true_extent(self) -> tuple[int, int]:
        """(lower bound, extent) of the data, in bytes."""
        where = self._alive().layout
        return where.true_lb, where.true_extent

    extent = property(lambda self: self.Get_extent()[1], doc="Bytes from one item to the next.")
    lb = property(lambda self: self.Get_extent()[0], doc="The lower bound in bytes.")
    ub = property(lambda self: sum(self.Get_extent()), doc="The upper bound in bytes.")
    true_extent = property(
        lambda self: self.Get_true_extent()[1], doc="Bytes from the first to the last of its data."
    )
    true_lb = property(lambda self: self.Get_true_extent()[0], doc="Where its data begins.")
    true_ub = property(lambda self: sum(self.Get_true_extent()), doc="Where its data ends.")

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

    @classmethod
    def _made(cls, *state: Any) -> Datatype:
        return cls._of(Type(*state))

    def Dup(self) -> Datatype:
        """The same type, with the attributes that are copied."""
        state = self._alive()
        made = self._made(state.layout, state.dtype, constants.COMBINER_DUP, (state,))
        made._state.code = state.code
        self._copy_all(made._state)
        return made

    Clone = Create_dup = Dup

    Create_contiguous = _constructor(constructors.contiguous)
    Create_vector = _constructor(constructors.vector)
    Create_hvector = _constructor(constructors.hvector)
    Create_indexed = _constructor(constructors.indexed)
    Create_hindexed = _constructor(constructors.hindexed)
    Create_indexed_block = _constructor(constructors.indexed_block)
    Create_hindexed_block = _constructor(constructors.hindexed_block)
    Create_subarray = _constructor(constructors.subarray)
    Create_darray = _constructor(constructors.darray)
    Create_resized = Resized = _constructor(constructors.resized)

    @classmethod
    def Create_struct(
        cls, blocklengths: Sequence[int], displacements: Sequence[int], datatypes: Sequence[Datatype]
    ) -> Datatype:
        """Blocks of these lengths and types, displaced by bytes."""
        lengths, at = _checked("blocklengths", blocklengths), _checked("displacements", displacements)
        types = tuple(one._alive() for one in datatypes)
        made = constructors.struct([one.layout for one in types], lengths, at)
        alike = {one.dtype for one in types}
        params = {"blocklengths": lengths, "displacements": at, "datatypes": list(datatypes)}
        dtype = alike.pop() if len(alike) == 1 else None
        return cls._made(made, dtype, constants.COMBINER_STRUCT, types, params)

    # ---- types that Fortran asks for

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Datatype:
        """The Fortran type of a class with this size."""
        found: Datatype = named.get(f"{_CLASSES.get(typeclass)}{size}", DATATYPE_NULL)
        if not found:
            raise Exception(constants.ERR_ARG, f"there is no type of {size} bytes in class {typeclass}")
        return found

    @classmethod
    def Get_value_index(cls, value: Datatype, index: Datatype) -> Datatype:
        """The type of pairs for MAXLOC; null where there is none."""
        if not value or not index:
            raise Exception(constants.ERR_TYPE, "a datatype is null")
        pairs = (named[f"{name}_INT"] for name in _PAIRED if index == named["INT"] and value == named[name])
        return next(pairs, cls())

    @classmethod
    def Create_f90_integer(cls, r: int) -> Datatype:
        """Fortran's integer of r decimal digits."""
        base = next((name for digits, name in _DIGITS if r <= digits), None)
        if base is None:
            raise Exception(constants.ERR_ARG, f"there is no integer of {r} digits")
        return cls._f90(base, constants.COMBINER_F90_INTEGER, r=r)

    @classmethod
    def Create_f90_real(cls, p: int, r: int) -> Datatype:
        """Fortran's real number of p digits and an exponent of r."""
        return cls._f90("REAL4" if p <= 6 and r <= 37 else "REAL8", constants.COMBINER_F90_REAL, p=p, r=r)

    @classmethod
    def Create_f90_complex(cls, p: int, r: int) -> Datatype:
        """Fortran's complex number of such reals."""
        base = "COMPLEX8" if p <= 6 and r <= 37 else "COMPLEX16"
        return cls._f90(base, constants.COMBINER_F90_COMPLEX, p=p, r=r)

    @classmethod
    def _f90(cls, base: str, combiner: int, **params: int) -> Datatype:
        where = named[base]._state
        made = cls._made(where.layout, where.dtype, combiner, (), params)
        made._state.code = where.code
        return made

    def Commit(self) -> Datatype:
        """Returns itself: a type is ready once it is made."""
        self._alive()
        return self

    def _release(self) -> None:
        self.Free()

    def Free(self) -> None:
        """Release it."""
        self._alive()
        self._refuse_constant("freed")
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
    """The integers and addresses of `Get_contents`: the length of lists is an integer before them."""
    params, name = dict(state.params), _COMBINERS[state.combiner]
    params.pop("datatypes", None)
    in_bytes = ("stride", "displacements") if name.startswith("H") or name == "STRUCT" else ("lb", "extent")
    numbers: tuple[list[int], list[int]] = [], []
    lists = [value for value in params.values() if isinstance(value, list)][:1]
    if name.endswith("BLOCK"):
        numbers[0].append(len(lists.pop()))
    for key, value in params.items():
        if lists and value is lists[0]:
            numbers[0].append(len(lists.pop()))
        numbers[key in in_bytes].extend(value if isinstance(value, list) else [value])
    return numbers


DATATYPE_NULL = Datatype()
