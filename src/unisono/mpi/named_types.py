"""The named datatypes, and which of them NumPy's types are."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.mpi import constants, layout
from unisono.mpi.datatype import DATATYPE_NULL, Datatype, Type, codes
from unisono.mpi.handle import Handle

_NAMED = {
    "BYTE": "B", "PACKED": "B", "AINT": "p", "OFFSET": "p", "COUNT": "p", "CHAR": "c", "WCHAR": "i",
    "SIGNED_CHAR": "b", "SHORT": "h", "INT": "i", "LONG": "l", "LONG_LONG": "q", "UNSIGNED_CHAR": "B",
    "UNSIGNED_SHORT": "H", "UNSIGNED": "I", "UNSIGNED_LONG": "L", "UNSIGNED_LONG_LONG": "Q", "FLOAT": "f",
    "DOUBLE": "d", "LONG_DOUBLE": "g", "C_BOOL": "?", "INT8_T": "b", "INT16_T": "h", "INT32_T": "i",
    "INT64_T": "l", "UINT8_T": "B", "UINT16_T": "H", "UINT32_T": "I", "UINT64_T": "L",
    "C_FLOAT_COMPLEX": "F", "C_DOUBLE_COMPLEX": "D", "C_LONG_DOUBLE_COMPLEX": "G", "CXX_BOOL": "?",
    "CXX_FLOAT_COMPLEX": "F", "CXX_DOUBLE_COMPLEX": "D", "CXX_LONG_DOUBLE_COMPLEX": "G", "CHARACTER": "c",
    "LOGICAL": "i", "INTEGER": "i", "REAL": "f", "DOUBLE_PRECISION": "d", "COMPLEX": "F",
    "DOUBLE_COMPLEX": "D", "LOGICAL1": "b", "LOGICAL2": "h", "LOGICAL4": "i", "LOGICAL8": "l",
    "INTEGER1": "b", "INTEGER2": "h", "INTEGER4": "i", "INTEGER8": "l", "REAL2": "e", "REAL4": "f",
    "REAL8": "d", "REAL16": "g", "COMPLEX8": "F", "COMPLEX16": "D", "COMPLEX32": "G", "FLOAT16_T": "e", "FLOAT32_T": "f",
    "FLOAT64_T": "d",
}  # fmt: skip
_PAIRS = {
    "SHORT_INT": "h", "INT_INT": "i", "LONG_INT": "l", "FLOAT_INT": "f", "DOUBLE_INT": "d",
    "LONG_DOUBLE_INT": "g",
}  # fmt: skip
_ABSENT = ("INTEGER16", "COMPLEX4", "LOGICAL16", "BFLOAT16_T")
_ALIASES = {
    "UNSIGNED_INT": "UNSIGNED", "SIGNED_SHORT": "SHORT", "SIGNED_INT": "INT", "SIGNED_LONG": "LONG",
    "SIGNED_LONG_LONG": "LONG_LONG", "BOOL": "C_BOOL", "C_COMPLEX": "C_FLOAT_COMPLEX", "TWOINT": "INT_INT",
    "F_BOOL": "LOGICAL", "F_INT": "INTEGER", "F_FLOAT": "REAL", "F_DOUBLE": "DOUBLE_PRECISION",
    "F_COMPLEX": "COMPLEX", "F_FLOAT_COMPLEX": "COMPLEX", "F_DOUBLE_COMPLEX": "DOUBLE_COMPLEX",
    "SINT8_T": "INT8_T", "SINT16_T": "INT16_T", "SINT32_T": "INT32_T", "SINT64_T": "INT64_T",
}  # fmt: skip
# The types that characters and NumPy's dtypes mean in a buffer.
_BY_CODE = (
    "C_BOOL", "CHAR", "SIGNED_CHAR", "UNSIGNED_CHAR", "SHORT", "UNSIGNED_SHORT", "INT", "UNSIGNED", "LONG",
    "UNSIGNED_LONG", "LONG_LONG", "UNSIGNED_LONG_LONG", "FLOAT", "DOUBLE", "LONG_DOUBLE", "C_FLOAT_COMPLEX",
    "C_DOUBLE_COMPLEX", "C_LONG_DOUBLE_COMPLEX", "FLOAT16_T", "AINT",
)  # fmt: skip


def _named() -> dict[str, Datatype]:
    found: dict[str, Datatype] = {}
    for name, code in _NAMED.items():
        dtype = np.dtype("l" if code == "p" else code)
        where = layout.basic(dtype.itemsize, dtype.alignment)
        found[name] = _make(name, Type(where, dtype, constants.COMBINER_NAMED))
        if name not in ("PACKED", "BYTE", "WCHAR"):
            found[name]._state.code = code
    found["BYTE"]._state.code = "B"
    for name, code in _PAIRS.items():
        dtype = np.dtype([("value", code), ("index", "i")], align=True)
        value, index = np.dtype(code), np.dtype("i")
        parts = [
            (0, layout.basic(value.itemsize, value.alignment)),
            (dtype.fields["index"][1], layout.basic(index.itemsize, index.alignment)),  # type: ignore[index]
        ]
        where = layout.padded(layout.joined(parts))
        found[name] = _make(name, Type(where, dtype, constants.COMBINER_NAMED))
    found.update({name: Datatype(DATATYPE_NULL) for name in _ABSENT})
    found.update({alias: found[name] for alias, name in _ALIASES.items()})
    return found


def _make(name: str, state: Type) -> Datatype:
    state.name = f"MPI_{name}"
    made: Datatype = Datatype._of(state)
    return made


NAMED = _named()


def _fill_codes() -> None:
    for name in _BY_CODE:
        one = NAMED[name]
        code = one._state.code
        codes[str(code)] = one
        if name not in ("CHAR", "AINT"):
            codes.setdefault(np.dtype(code).str[1:], one)
    codes.update({"l": NAMED["LONG"], "i8": NAMED["LONG"], "u8": NAMED["UNSIGNED_LONG"]})
    codes.update({"S": NAMED["CHAR"], "S1": NAMED["CHAR"], "s": NAMED["CHAR"], "n": NAMED["AINT"]})
    codes.update({"p": NAMED["AINT"], "P": NAMED["AINT"], "N": NAMED["AINT"]})
    for letter, name in (("f", "C_FLOAT_COMPLEX"), ("d", "C_DOUBLE_COMPLEX"), ("g", "C_LONG_DOUBLE_COMPLEX")):
        codes[f"Z{letter}"] = NAMED[name]


_fill_codes()


def _of_class(kind: str, size: int) -> Datatype:
    name = {"i": "INTEGER", "f": "REAL", "c": "COMPLEX"}[kind] + str(size)
    return NAMED.get(name, DATATYPE_NULL)


def match_size(typeclass: int, size: int) -> Datatype:
    """The Fortran type of a class with this size."""
    kind = {
        constants.TYPECLASS_INTEGER: "i", constants.TYPECLASS_REAL: "f", constants.TYPECLASS_COMPLEX: "c",
    }.get(typeclass)  # fmt: skip
    found = NAMED.get(f"LOGICAL{size}", DATATYPE_NULL) if kind is None else _of_class(kind, size)
    if not found:
        from unisono.mpi.errors import Exception

        raise Exception(constants.ERR_ARG, f"there is no type of {size} bytes in class {typeclass}")
    return found


def value_index(value: Datatype, index: Datatype) -> Datatype:
    """The type of pairs for MAXLOC; null where there is none."""
    if index == NAMED["INT"]:
        for name, code in _PAIRS.items():
            if value._state is not None and value._state.code == code:
                return NAMED[name]
    return DATATYPE_NULL


def _predefined(made: Any) -> Any:
    return Datatype(made)


def f90(base: str, combiner: int, **params: Any) -> Datatype:
    """The type of Fortran with this precision."""
    where = NAMED[base]._state
    made: Datatype = Datatype._of(Type(where.layout, where.dtype, combiner, (), params))
    made._state.code = where.code
    return made


def f90_integer(r: int) -> Datatype:
    """An integer of r decimal digits."""
    base = next(
        n
        for digits, n in ((2, "INTEGER1"), (4, "INTEGER2"), (9, "INTEGER4"), (99, "INTEGER8"))
        if r <= digits
    )
    return f90(base, constants.COMBINER_F90_INTEGER, r=r)


def f90_real(p: int, r: int) -> Datatype:
    """A real number of p digits and an exponent of r."""
    return f90("REAL4" if p <= 6 and r <= 37 else "REAL8", constants.COMBINER_F90_REAL, p=p, r=r)


def f90_complex(p: int, r: int) -> Datatype:
    """A complex number of such reals."""
    return f90("COMPLEX8" if p <= 6 and r <= 37 else "COMPLEX16", constants.COMBINER_F90_COMPLEX, p=p, r=r)


Datatype.Match_size = staticmethod(match_size)  # type: ignore[attr-defined]
Datatype.Get_value_index = staticmethod(value_index)  # type: ignore[attr-defined]
Datatype.Create_f90_integer = staticmethod(f90_integer)  # type: ignore[attr-defined]
Datatype.Create_f90_real = staticmethod(f90_real)  # type: ignore[attr-defined]
Datatype.Create_f90_complex = staticmethod(f90_complex)  # type: ignore[attr-defined]
_ = Handle
