"""A group of CUDA tensors that takes NumPy arrays: for tests, which have those.

Every array of a call is copied to the device, and back once the call is done. An array that lies in another
one of the call becomes a view of that one's tensor, so that what is shared stays shared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import unisono as un


class OnDevice:
    """The group; what is no array goes through as it is."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._group, name)
        if not callable(value) or name.endswith("_object"):
            return value
        return lambda *args, **options: self._call(value, args, options)

    def _call(self, method: Any, args: Any, options: Any) -> Any:
        copies = Copies([*args, *options.values()])
        found = method(
            *map(copies.there, args), **{key: copies.there(value) for key, value in options.items()}
        )
        if isinstance(found, list) and found and isinstance(found[0], un.Work):
            return [CopyingWork(one, copies) for one in found]
        if isinstance(found, un.Work):
            return CopyingWork(found, copies)
        copies.come_back()
        if isinstance(found, un.Group):
            return OnDevice(found)
        return array(found) if isinstance(found, torch.Tensor) else found

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *error: Any) -> None:
        self._group.__exit__(*error)


class CopyingWork(un.Work):
    """Work that copies what has come once it is done."""

    def __init__(self, work: Any, copies: Copies) -> None:
        self._work, self._copies = work, copies

    def done(self) -> bool:
        done = self._work.done()
        if done:
            self._copies.come_back()
        return done

    def wait(self, timeout: Any = None) -> None:
        self._work.wait(timeout)
        self._copies.come_back()

    def retain_buffers(self) -> None:
        self._work.retain_buffers()

    def _what(self) -> str:
        return self._work._what()

    @property
    def source(self) -> int:
        return self._work.source


class Copies:
    """The arrays of one call on the device."""

    def __init__(self, values: list[Any]) -> None:
        self._made: dict[int, tuple[np.ndarray, torch.Tensor]] = {}
        owners: dict[int, list[np.ndarray]] = {}  # arrays of one memory, the largest first
        for x in sorted(arrays(values), key=lambda x: -x.nbytes):
            relatives = owners.setdefault(id(owner(x)), [])
            self._made[id(x)] = (x, self._within(x, relatives))
            relatives.append(x)

    def there(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._made[id(value)][1] if id(value) in self._made else value
        if type(value) in (list, tuple):
            return type(value)(self.there(one) for one in value)
        if isinstance(value, (un.SendTo, un.RecvFrom)):
            return value._replace(x=self.there(value.x))
        return value

    def come_back(self) -> None:
        for x, copy in self._made.values():
            if x.flags.writeable:
                x[...] = array(copy).reshape(x.shape)

    def _within(self, x: np.ndarray, relatives: list[np.ndarray]) -> torch.Tensor:
        for whole in relatives if x.nbytes else []:
            offset = x.ctypes.data - whole.ctypes.data
            if offset >= 0 and offset + x.nbytes <= whole.nbytes and x.dtype == whole.dtype:
                start = offset // x.itemsize
                return self._made[id(whole)][1].view(-1)[start : start + x.size].view(x.shape)
        return tensor(x)


def owner(x: np.ndarray) -> Any:
    while isinstance(x, np.ndarray) and x.base is not None:
        x = x.base
    return x


def arrays(values: Any) -> list[np.ndarray]:
    found = []
    for value in values:
        if isinstance(value, np.ndarray) and value.dtype.name in KNOWN and value.flags.c_contiguous:
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += arrays(value)
    return found


KNOWN = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip


def tensor(x: np.ndarray) -> torch.Tensor:
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16).cuda()
    return torch.from_numpy(x.copy()).cuda()


def array(x: torch.Tensor) -> np.ndarray:
    x = x.cpu()
    if x.dtype is torch.bfloat16:
        import ml_dtypes

        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()
