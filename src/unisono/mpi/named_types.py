"""The named datatypes, and which of them NumPy's types are."""

from __future__ import annotations

import numpy as np

from unisono.mpi import constants, layout
from unisono.mpi.datatype import DATATYPE_NULL, Datatype
from unisono.mpi.layout import Type, codes, named

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
    "REAL8": "d", "REAL16": "g", "COMPLEX8": "F", "COMPLEX16": "D", "COMPLEX32": "G", "FLOAT16_T": "e",
    "FLOAT32_T": "f", "FLOAT64_T": "d",
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
_OTHER_CODES = {
    "i8": "l", "u8": "L", "S": "c", "S1": "c", "s": "c", "n": "p", "P": "p", "N": "p", "Zf": "F", "Zd": "D",
    "Zg": "G",
}  # fmt: skip


def _named() -> dict[str, Datatype]:
    found: dict[str, Datatype] = {}
    for name, code in _NAMED.items():
        dtype = np.dtype("l" if code == "p" else code)
        where = layout.basic(dtype.itemsize, dtype.alignment)
        found[name] = _make(name, Type(where, dtype, constants.COMBINER_NAMED))
        found[name]._state.code = code
    for name, code in _PAIRS.items():
        dtype = np.dtype([("value", code), ("index", "i")], align=True)
        fields = [dtype.fields[field] for field in ("value", "index")]  # type: ignore[index]
        parts = ((at, layout.basic(one.itemsize, one.alignment)) for one, at, *_ in fields)
        where = layout.padded(layout.joined(parts))
        found[name] = _make(name, Type(where, dtype, constants.COMBINER_NAMED))
    found.update({name: Datatype(DATATYPE_NULL) for name in _ABSENT})
    found.update({alias: found[name] for alias, name in _ALIASES.items()})
    return found


def _make(name: str, state: Type) -> Datatype:
    state.name = f"MPI_{name}"
    return Datatype._of(state)


named.update(_named())
NAMED: dict[str, Datatype] = named


def _fill_codes() -> None:
    for name in _BY_CODE:
        code = NAMED[name]._state.code
        codes[code] = NAMED[name]
        if name not in ("CHAR", "AINT"):
            codes.setdefault(np.dtype(code).str[1:], NAMED[name])
    codes["V1"] = NAMED["BYTE"]
    for other, code in _OTHER_CODES.items():
        codes[other] = codes[code]


_fill_codes()
