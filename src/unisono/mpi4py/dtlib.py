"""mpi4py.util.dtlib: datatypes of NumPy as datatypes of MPI, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono import MPI

__all__ = ["from_numpy_dtype", "to_numpy_dtype"]


def from_numpy_dtype(dtype: Any) -> Any:
    """The MPI datatype of a NumPy dtype: elementary, with fields, or a subarray.

    Raises:
        ValueError: it has Python objects or another byte order; MPI has no such type.
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise ValueError("NumPy datatype with object entries")
    if not dtype.isnative:
        raise ValueError("NumPy datatype with non-native byteorder")
    if dtype.fields:
        fields = [dtype.fields[name] for name in dtype.names or ()]
        types = [from_numpy_dtype(field[0]) for field in fields]
        whole = MPI.Datatype.Create_struct([1] * len(fields), [field[1] for field in fields], types)
        return whole.Create_resized(0, dtype.itemsize)
    if dtype.subdtype:
        base, shape = dtype.subdtype
        one = from_numpy_dtype(base)
        if len(shape) == 1:
            return one.Create_contiguous(shape[0])
        return one.Create_subarray(shape, shape, (0,) * len(shape))
    return MPI.Datatype.fromcode(dtype.char).Dup()


def to_numpy_dtype(datatype: Any) -> Any:
    """The NumPy dtype of an MPI datatype: one item of its extent.

    Raises:
        ValueError: it is null, or lies in memory as no dtype can (a subarray of a larger array).
    """
    if datatype == MPI.DATATYPE_NULL:
        raise ValueError("cannot convert null MPI datatype to NumPy")
    basetype, kind, info = datatype.decode()
    if kind == "NAMED" or kind.startswith("F90"):
        return _elementary(datatype)
    return _derived(datatype, basetype, info)


def _elementary(datatype: Any) -> Any:
    dtype = datatype._state.dtype
    if dtype is None:
        raise ValueError("cannot convert MPI datatype to NumPy")
    if dtype.names is None:
        return np.dtype(dtype.char)
    return np.dtype(",".join(dtype[name].char for name in dtype.names), align=True)  # pairs


def _derived(datatype: Any, basetype: Any, info: dict[str, Any]) -> Any:
    kind = datatype.combiner
    if kind == MPI.COMBINER_DUP:
        return to_numpy_dtype(basetype)
    if kind == MPI.COMBINER_CONTIGUOUS:
        return np.dtype((to_numpy_dtype(basetype), (info["count"],)))
    if kind == MPI.COMBINER_SUBARRAY:
        return _subarray(basetype, info)
    if kind == MPI.COMBINER_RESIZED and basetype.combiner == MPI.COMBINER_STRUCT:
        return _struct(basetype.decode()[2], datatype.extent, _is_aligned(basetype, info["extent"]))
    if kind == MPI.COMBINER_STRUCT:
        return _struct(info, datatype.extent, True)
    places = _places(kind, basetype, info)
    if places is None:
        raise ValueError("cannot convert MPI datatype to NumPy")
    one, (lengths, offsets) = to_numpy_dtype(basetype), places
    fields: Any = {
        "names": [f"f{i}" for i in range(len(lengths))],
        "formats": [(one, (length,)) for length in lengths],
        "offsets": offsets,
        "aligned": all(offset % one.alignment == 0 for offset in offsets),
    }
    if kind in (MPI.COMBINER_VECTOR, MPI.COMBINER_HVECTOR):
        fields["itemsize"] = datatype.extent
    return np.dtype(fields)


def _subarray(basetype: Any, info: dict[str, Any]) -> Any:
    sizes = info["sizes"]
    if info["subsizes"] != sizes or any(info["starts"]):
        raise ValueError("cannot convert subarray MPI datatype to NumPy")
    shape = sizes[::-1] if info["order"] == MPI.ORDER_FORTRAN else sizes
    return np.dtype((to_numpy_dtype(basetype), tuple(shape)))


def _struct(info: dict[str, Any], itemsize: int, aligned: bool) -> Any:
    types, lengths, offsets = info["datatypes"], info["blocklengths"], info["displacements"]
    one = [to_numpy_dtype(each) for each in types]
    return np.dtype(
        {
            "names": [f"f{i}" for i in range(len(types))],
            "formats": [d if n == 1 else (d, n) for d, n in zip(one, lengths, strict=True)],
            "offsets": offsets,
            "itemsize": itemsize,
            "aligned": aligned and all(at % d.alignment == 0 for d, at in zip(one, offsets, strict=True)),
        }
    )


def _places(kind: int, basetype: Any, info: dict[str, Any]) -> tuple[list[int], list[int]] | None:
    """Elements and byte offsets of the blocks of a vector or an indexed type; None: it is neither."""
    in_items = kind in (MPI.COMBINER_VECTOR, MPI.COMBINER_INDEXED, MPI.COMBINER_INDEXED_BLOCK)
    unit = basetype.extent if in_items else 1
    if "stride" in info:
        return [info["blocklength"]] * info["count"], [
            info["stride"] * unit * i for i in range(info["count"])
        ]
    if "displacements" not in info:
        return None
    offsets = [at * unit for at in info["displacements"]]
    return info.get("blocklengths") or [info["blocklength"]] * len(offsets), offsets


def _is_aligned(datatype: Any, offset: int) -> bool:
    """Whether all elements of an item at a byte offset lie at multiples of their alignment."""
    try:
        return bool(offset % to_numpy_dtype(datatype).alignment == 0)
    except ValueError:
        return False
