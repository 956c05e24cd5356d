"""The address, number of elements and dtype of any array; or a clear error before a byte moves.

Native code reads NumPy arrays, other objects with the buffer protocol, and torch CPU tensors, without
importing torch. Other objects may offer DLPack. The caller keeps the array alive while its address is in use.

An array whose values are not the bytes in its memory alone is refused: a mask, units, a sparse layout or the
parts of a wrapper would be lost without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono import _native

if TYPE_CHECKING:
    import numpy as np

DTYPES: tuple[str, ...] = tuple(name for name, _ in _native.dtypes())
"""Names of the element types; a dtype's index is its code."""

REDUCIBLE: tuple[str, ...] = tuple(name for code, name in enumerate(DTYPES) if _native.reducible(code, 0))
"""Those with arithmetic; the others are moved only."""

ITEMSIZES: tuple[int, ...] = tuple(nbytes for _, nbytes in _native.dtypes())


_RAW = DTYPES.index("bits8")
"""Bytes without arithmetic: what a dtype without a code is moved as."""


class BufferView(NamedTuple):
    """A contiguous piece of CPU memory: `numel` elements of `DTYPES[dtype]` at `address`."""

    address: int
    numel: int
    dtype: int


class DeviceArray:
    """A tensor in device memory, in a group that can move it: `view` accepts its device address.

    Args:
        host: the NumPy array that it is a copy of.
    Raises:
        TypeError, ValueError: as `view`.
    """

    def __init__(self, tensor: Any, host: Any = None) -> None:
        self.tensor = tensor
        self.extent = _tensor(tensor, "a tensor", here=True)
        self._host = host

    def give_back(self) -> None:
        """Copy the received data to the array in CPU memory, if there is one."""
        if self._host is not None and self._host.flags.writeable:
            self._host[...] = self.tensor.cpu().numpy()

    @property
    def shape(self) -> Any:
        """The tensor's."""
        return self.tensor.shape

    @property
    def dtype(self) -> Any:
        """The tensor's."""
        return self.tensor.dtype

    def new_empty(self, shape: Any) -> DeviceArray:
        """A new one of the same kind."""
        return DeviceArray(self.tensor.new_empty(shape))


def view(array: Any, writable: bool = True, name: str = "buffer") -> tuple[int, int, int]:
    """Check one array; returns (address, numel, dtype), the fields of a `BufferView`.

    Args:
        array: NumPy array, torch CPU tensor, or anything with the buffer protocol or DLPack; contiguous.
        writable: the operation will write to it.  name: its name in an error.
    Raises:
        TypeError: it is no array, or of a dtype that collectives do not know, or its values are more than its
            bytes.
        ValueError: it is not contiguous, not writable, or not in CPU memory.
    """
    found = _native.view(array, writable)
    if found is not None:
        return found
    if isinstance(array, DeviceArray):
        return array.extent
    if is_tensor(array):
        try:
            return _tensor(array, name)
        except AttributeError as error:
            raise TypeError(
                f"{name} is a {type(array).__name__}, which is no torch tensor: {error}"
            ) from None
    import numpy as np  # imported late: a program without NumPy starts faster

    if writable and isinstance(array, np.generic):
        raise ValueError(f"{name} is a NumPy scalar, which cannot be changed; use np.array({name})")
    if isinstance(array, np.ndarray | np.generic):
        _refuse_own_values(array, name)
        return _awkward_numpy(np.asarray(array), writable, name)
    if hasattr(array, "__dlpack__"):
        return _dlpack(array, writable, name)
    return _refuse(array, writable, name)


def is_tensor(array: Any) -> bool:
    """Whether it is a torch tensor, decided without importing torch."""
    return hasattr(array, "data_ptr") and hasattr(array, "is_contiguous")


def views(arrays: Sequence[Any], *, writable: bool, name: str) -> tuple[int, list[tuple[int, int]]]:
    """Check a list of arrays of one dtype; returns the dtype, and (address, numel) of each."""
    extents = []
    first = -1
    for i, array in enumerate(arrays):
        seen = _native.view(array, writable)
        address, numel, dtype = seen or view(array, writable, f"{name}[{i}]")
        if dtype != first:
            if i:
                raise ValueError(
                    f"{name}[{i}] is {DTYPES[dtype]}, {name}[0] is {DTYPES[first]}: "
                    "the arrays of one call share a dtype"
                )
            first = dtype
        extents.append((address, numel))
    return first, extents


def pinned(buffers: Any) -> Any:
    """The objects that keep a call's memory valid while the call is under way: an array, or those of a list.

    Another thread may change the list. The owner of a buffer, such as a bytearray, may resize it; a view
    prevents that.
    """
    if isinstance(buffers, (list, tuple)):
        return tuple(map(_pinned, buffers))
    return _pinned(buffers)


def _pinned(buffer: Any) -> Any:
    try:
        return buffer if is_tensor(buffer) else memoryview(buffer)
    except Exception:  # noqa: BLE001  (no buffer, or with elements unknown to memoryview)
        return buffer


def dtype_code(name: str) -> int:
    """The code of a dtype by name.

    Raises:
        TypeError: collectives do not know it; the text lists those they know.
    """
    if name not in REDUCIBLE:
        raise TypeError(f"dtype {name} is not one of {', '.join(REDUCIBLE)}{instead(name)}")
    return DTYPES.index(name)


def instead(name: str) -> str:
    """Advice for a dtype that collectives do not know, or that they only move."""
    if name == "bits8":
        return "; a dtype that is not one of these is moved as its bytes"
    if name in ("uint16", "uint32", "uint64"):
        return f"; viewed as {name[1:]} it has the same bits, which is right for all but MIN and MAX"
    if name.startswith(("qint", "quint")):
        return "; pass int_repr() of the quantized tensor, and its scale and zero point"
    if name.startswith(("datetime64", "timedelta64")):
        return "; viewed as int64 it has the same bits"
    return "; to move it as it is, view it as uint8" if name.startswith(("void", "str", "bytes")) else ""


@lru_cache(maxsize=64)
def _torch_dtype(dtype: Any) -> int:
    name = str(dtype).removeprefix("torch.")
    return DTYPES.index(name) if name in DTYPES else dtype_code(name)


@lru_cache(maxsize=16)
def _strided(layout: Any) -> bool:
    return str(layout) == "torch.strided"


@lru_cache(maxsize=64)
def _dispatches(kind: type) -> bool:
    """Whether tensors of this class compute with code of their own, as a DTensor or a MaskedTensor."""
    torch = sys.modules.get("torch")
    usual = None if torch is None else torch.Tensor.__torch_dispatch__
    return getattr(kind, "__torch_dispatch__", None) is not usual


def refuse_wrapper(tensor: Any, name: str) -> None:
    """Refuse a tensor whose values are not the bytes in its memory alone.

    Raises:
        TypeError: it is sparse or nested, a wrapper of other tensors, or a part of a trace.
    """
    kind = type(tensor).__name__
    if getattr(tensor, "is_nested", False):
        raise TypeError(
            f"{name} is a nested tensor, whose lengths would be lost; pass .values() and .offsets()"
        )
    if not _strided(tensor.layout):
        raise TypeError(f"{name} has layout {tensor.layout}, expected a dense tensor: call .to_dense()")
    of_class: Any = type(tensor)
    if _dispatches(of_class):
        raise TypeError(
            f"{name} is a {kind}, whose values are not the bytes in its memory; pass the plain tensors that "
            "it is made of: a DTensor has .to_local(), a MaskedTensor .get_data() and .get_mask()"
        )
    try:
        missing = tensor.numel() and not tensor.data_ptr()
    except RuntimeError:  # inside torch.func.vmap or torch.func.grad
        missing = True
    if missing:
        raise TypeError(f"{name} is a {kind} that holds no memory of its own, expected a plain tensor")


def _tensor(tensor: Any, name: str, here: bool = False) -> tuple[int, int, int]:
    """here: its memory may be any device's."""
    refuse_wrapper(tensor, name)
    if not (tensor.is_cpu or here):
        raise ValueError(
            f"{name} is on {tensor.device}; this group moves CPU memory. Copy it with .cpu() first"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous (strides {tensor.stride()}); use .contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError(f"{name} is a lazy conjugate or negative; use .resolve_conj().resolve_neg()")
    return tensor.data_ptr(), tensor.numel(), _torch_dtype(tensor.dtype)


def _refuse_own_values(array: np.ndarray[Any, Any] | np.generic, name: str) -> None:
    """Refuse arrays of classes with a mask, or with arithmetic of their own; see `is_array_of_its_own`."""
    import numpy as np

    kind: Any = type(array)
    if hasattr(kind, "mask"):
        raise TypeError(
            f"{name} is a {kind.__name__}, whose mask would be lost; pass {name}.filled(value), or its data "
            "and its mask as two arrays"
        )
    if isinstance(array, np.ndarray) and kind.__array_ufunc__ is not np.ndarray.__array_ufunc__:
        raise TypeError(
            f"{name} is a {kind.__name__}, an array that computes in a way of its own; what it has beside "
            f"its numbers would be lost. For the numbers alone pass np.asarray({name})"
        )


def _awkward_numpy(array: np.ndarray[Any, Any], writable: bool, name: str) -> BufferView:
    """Arrays without a buffer, such as bfloat16 of ml_dtypes; or the error of an ordinary one."""
    if not array.flags.c_contiguous:
        remedy = f"use y = np.ascontiguousarray({name})"
        if writable:
            remedy += f", call with y, then {name}[...] = y"
        raise ValueError(f"{name} is not contiguous (strides {array.strides}); {remedy}")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} is read-only, and the operation writes to it")
    if array.dtype.byteorder not in ("=", "|", "<"):
        raise TypeError(f"{name} has the byte order of another machine ({array.dtype}); convert it first")
    address = array.__array_interface__["data"][0]
    if array.dtype.hasobject:
        raise TypeError(
            f"{name} has elements that are Python objects ({array.dtype}); send it with an *_object call"
        )
    if array.dtype.name in DTYPES:
        return BufferView(address, array.size, DTYPES.index(array.dtype.name))
    return BufferView(address, array.nbytes, _RAW)


def _dlpack(array: Any, writable: bool, name: str) -> BufferView:
    """Refuse exporters that copy without saying so: two exports of one array have different addresses."""
    import numpy as np

    try:
        found, again = np.from_dlpack(array), np.from_dlpack(array)
    except (TypeError, BufferError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name} cannot be seen as CPU memory through DLPack: {error}") from error
    seen = _awkward_numpy(found, writable and _can_be_read_only(array), name)
    if found.nbytes and again.__array_interface__["data"][0] != seen.address:
        raise ValueError(
            f"{name} is a {type(array).__name__}, which hands out copies of itself through DLPack. "
            f"Use y = np.from_dlpack({name}) and call with y"
        )
    return seen


def _can_be_read_only(array: Any) -> bool:
    """Whether an exporter can say so: NumPy takes the memory of all older ones as read-only."""
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:
        return False
    return "dltensor_versioned" in repr(capsule)


def _refuse(array: Any, writable: bool, name: str) -> BufferView:
    try:
        memory = memoryview(array)
    except TypeError:
        raise TypeError(
            f"{name} is a {type(array).__name__}; expected a NumPy array, a torch CPU tensor, "
            "or an object with the buffer protocol or DLPack"
        ) from None
    with memory:
        if not memory.c_contiguous:
            raise ValueError(f"{name} is not contiguous")
        if writable and memory.readonly:
            raise ValueError(f"{name} is read-only, and the operation writes to it")
        raise TypeError(f"{name} has elements of format {memory.format!r}; known dtypes: {', '.join(DTYPES)}")
