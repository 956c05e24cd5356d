"""Datatypes by what Fortran asks for: a class and a size, or digits and an exponent; and pairs for MAXLOC."""

from __future__ import annotations

from typing import Any

from unisono.mpi import constants
from unisono.mpi.errors import Exception
from unisono.mpi.type_state import Type, named

_NAMES = {
    constants.TYPECLASS_INTEGER: "INTEGER", constants.TYPECLASS_REAL: "REAL",
    constants.TYPECLASS_COMPLEX: "COMPLEX", constants.TYPECLASS_LOGICAL: "LOGICAL",
}  # fmt: skip
_DIGITS = ((2, "INTEGER1"), (4, "INTEGER2"), (9, "INTEGER4"), (18, "INTEGER8"))
_PAIRED = ("SHORT", "INT", "LONG", "FLOAT", "DOUBLE", "LONG_DOUBLE")
_SINGLE = (6, 37)


class FortranTypes:
    """The constructors of `Datatype` that look for a type."""

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Any:
        """The Fortran type of a class with this size."""
        found = named.get(f"{_NAMES.get(typeclass)}{size}")
        if not found:
            raise Exception(constants.ERR_ARG, f"there is no type of {size} bytes in class {typeclass}")
        return found

    @classmethod
    def Get_value_index(cls, value: Any, index: Any) -> Any:
        """The type of pairs for MAXLOC; null where there is none."""
        if not value or not index:
            raise Exception(constants.ERR_TYPE, "a datatype is null")
        if index == named["INT"]:
            for name in _PAIRED:
                if value == named[name]:
                    return named[f"{name}_INT"]
        return cls()

    @classmethod
    def Create_f90_integer(cls, r: int) -> Any:
        """Fortran's integer of r decimal digits."""
        base = next((name for digits, name in _DIGITS if r <= digits), None)
        return cls._f90(base, constants.COMBINER_F90_INTEGER, r=r)

    @classmethod
    def Create_f90_real(cls, p: int, r: int) -> Any:
        """Fortran's real number of p digits and an exponent of r."""
        base = "REAL4" if p <= _SINGLE[0] and r <= _SINGLE[1] else "REAL8"
        return cls._f90(base, constants.COMBINER_F90_REAL, p=p, r=r)

    @classmethod
    def Create_f90_complex(cls, p: int, r: int) -> Any:
        """Fortran's complex number of such reals."""
        base = "COMPLEX8" if p <= _SINGLE[0] and r <= _SINGLE[1] else "COMPLEX16"
        return cls._f90(base, constants.COMBINER_F90_COMPLEX, p=p, r=r)

    @classmethod
    def _f90(cls, base: str | None, combiner: int, **params: int) -> Any:
        if base is None:
            raise Exception(constants.ERR_ARG, f"there is no such type: {params}")
        where = named[base]._state
        state = Type(where.layout, where.dtype, combiner, (), params)
        state.code = where.code
        return cls._of(state)  # type: ignore[attr-defined]
