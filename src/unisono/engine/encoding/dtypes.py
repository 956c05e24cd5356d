"""NumPy's element types as text, and back.

A text is one of:

    "<f4", ">i8", "|S5", "<M8[ns]"    as NumPy writes them
    "bfloat16"                        those of ml_dtypes, by name
    {"fields": [["x", "<f4", 0]], "nbytes": 8}, {"base": "<i4", "shape": [2]}    structured ones, as JSON
"""

from __future__ import annotations

import importlib
import re
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

__all__ = ["describe", "restore"]

DType = np.dtype[Any]

_PLAIN = re.compile(r"[<>|][biufcmMSUV][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}(/[0-9]{1,9})?\])?")
_NAME = re.compile(r"[a-z][a-z0-9_]{1,30}")
_MAX_DEPTH = 16


class _StructuredDtype(msgspec.Struct, forbid_unknown_fields=True):
    """A structured type, or, with a base, a fixed array of another."""

    fields: list[tuple[str, str, int]] = []
    nbytes: int = 0
    base: str = ""
    shape: list[int] = []


_decode = msgspec.json.Decoder(_StructuredDtype).decode


@lru_cache(maxsize=256)
def describe(dtype: DType) -> str | None:
    """The text of an element type; None when it has no fixed size, or the text would lose information."""
    text = _describe(dtype)
    try:
        return text if text is not None and restore(text) == dtype else None
    except ValueError:
        return None


def _describe(dtype: DType) -> str | None:
    if dtype.hasobject:
        return None
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes":
        return str(dtype.name)
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return _json(_StructuredDtype(base=_describe(base) or "", shape=list(shape)))
    if dtype.fields is None:
        return str(dtype.str)
    fields = []
    for name in dtype.names or ():
        element, offset = dtype.fields[name][:2]
        fields.append((name, _describe(element) or "", offset))
    return _json(_StructuredDtype(fields=fields, nbytes=dtype.itemsize))


def _json(record: _StructuredDtype) -> str:
    return msgspec.json.encode(record).decode()


def restore(text: str, depth: int = 0) -> DType:
    """The element type of a text.

    Raises:
        ValueError: it is no element type, it has no size, or ml_dtypes is not installed here.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("cannot decode: an element type is nested too deep")
    try:
        dtype = _restore(text, depth)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise ValueError(f"cannot decode: {text[:80]!r} is no element type of NumPy ({error})") from None
    if dtype.itemsize == 0 or dtype.hasobject:
        raise ValueError(f"cannot decode: elements of type {text[:80]!r} have no bytes of their own")
    return dtype


def _restore(text: str, depth: int) -> DType:
    if _PLAIN.fullmatch(text):
        return np.dtype(text)
    if _NAME.fullmatch(text):
        return _extension(text)
    record = _decode(text)
    if record.base:
        return np.dtype((restore(record.base, depth + 1), tuple(record.shape)))
    return np.dtype(
        {
            "names": [name for name, _, _ in record.fields],
            "formats": [restore(each, depth + 1) for _, each, _ in record.fields],
            "offsets": [offset for _, _, offset in record.fields],
            "itemsize": record.nbytes,
        }
    )


def _extension(name: str) -> DType:
    try:
        found = getattr(importlib.import_module("ml_dtypes"), name)
    except ImportError:
        raise ValueError("it takes the package ml_dtypes; install it on the receiving rank") from None
    except AttributeError:
        raise ValueError("ml_dtypes has no such type") from None
    if not (isinstance(found, type) and issubclass(found, np.generic)):
        raise ValueError("ml_dtypes has no such type")
    return np.dtype(found)
