"""Counts the memory of a program that runs on shapes: each storage, from its operator to its end.

What an operator's kernel takes and gives back within itself is not seen, but for what kernel_memory.py knows.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unisono.torch_internals import autograd
from unisono.torch_internals.fake import OperatorMode, memory_of, number_read

from .kernel_memory import KernelMemory
from .memory_account import Charge, MemoryTracker, ProgramLocation

__all__ = ["StorageWatch"]

HERE = os.path.dirname(__file__) + os.sep
PACKAGES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


class StorageWatch(OperatorMode):
    """A mode that charges every new storage on one type of device.

    Args:
        device_type: of the shapes.
        inside: operator -> bytes that its kernels take and give back within it.
    Attributes:
        account: takes the charges. Its `where` is this object's `place`.
        cause: of what is made now.
        phase: of the step.
        numbers: a number that is read from a tensor is 1, or 0.5; otherwise such a program raises.
    """

    def __init__(self, device_type: str, inside: dict[str, KernelMemory]) -> None:
        super().__init__()
        self._inside = inside
        self.account: Any = None
        self.cause, self.phase, self.numbers = "temporary", "", False
        self._device_type = device_type
        self._charges: dict[int, Charge | None] = {}  # of a storage, by its address; None: it is not counted
        self._ends: dict[int, Any] = {}
        self._modules: list[str] = []
        self._places: dict[int, tuple[str, str]] = {}  # number of an autograd function -> module, line

    def begin(self, account: MemoryTracker) -> None:
        """Charge to this account from now on."""
        self.account = account

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.numbers and (number := number_read(func, args)) is not None:
            return number
        output = func(*args, **(kwargs or {}))
        inside = self._inside.get(func.name())
        if inside is not None and args[0].device.type == self._device_type:
            self.account.release(self.account.charge(inside(output, *args), "temporary"))
        if isinstance(output, Tensor):
            self.see(output)
        elif isinstance(output, (tuple, list)):
            for part in output:
                if isinstance(part, Tensor):
                    self.see(part)
        if self._modules and self.phase == "forward":
            self._places.setdefault(autograd.next_sequence() - 1, (self._modules[-1], _line()))
        return output

    def see(self, tensor: Tensor, *, counts: bool = True) -> None:
        """Charge the storage of a tensor, if it is new. `counts`: otherwise it is never charged."""
        if tensor.device.type != self._device_type:
            return
        storage, key = memory_of(tensor)
        if key in self._charges:
            return
        charge = self.account.charge(storage.nbytes(), self.cause) if counts else None
        self._charges[key] = charge
        self._ends[key] = weakref.ref(storage, lambda _: self._end(key))

    def relabel(self, tensor: Tensor, cause: str) -> None:
        """Count the storage of a tensor under another cause."""
        charge = self._charges.get(memory_of(tensor)[1])
        if charge is not None:
            self.account.relabel(charge, cause)

    def leave(self, tensor: Tensor) -> None:
        """Count the storage of a tensor no more: a run frees its memory, and keeps the tensor."""
        key = memory_of(tensor)[1]
        charge = self._charges.get(key)
        if charge is not None:
            self._charges[key] = None
            self.account.release(charge)

    def come(self, tensor: Tensor, cause: str) -> None:
        """Count the storage of a tensor that has left: it has memory again."""
        storage, key = memory_of(tensor)
        if self._charges[key] is None and tensor.device.type == self._device_type:
            self._charges[key] = self.account.charge(storage.nbytes(), cause)

    def _end(self, key: int) -> None:
        charge = self._charges.pop(key, None)
        self._ends.pop(key, None)
        if charge is not None:
            self.account.release(charge)

    @contextmanager
    def labelled(self, cause: str) -> Iterator[None]:
        """Charge what is made here to another cause."""
        before, self.cause = self.cause, cause
        try:
            yield
        finally:
            self.cause = before

    def follow(self, root: nn.Module, names: dict[nn.Module, str]) -> None:
        """Know where the program is: in which of these modules."""
        for module in root.modules():
            path = names.get(module, "")
            module.register_forward_pre_hook(self._enter(path), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, path: str) -> Any:
        return lambda *_: self._modules.append(path)

    def _leave(self, *_: Any) -> None:
        self._modules.pop()

    def place(self) -> ProgramLocation:
        """Where the program is now."""
        if self.phase == "backward" and not self._modules:
            return ProgramLocation(self.phase, *self._places.get(autograd.running_sequence(), ("", "")))
        path = self._modules[-1] if self._modules else ""
        again = self.phase == "backward"
        return ProgramLocation(
            "recomputation" if again else self.phase, path, _line() if path or not again else ""
        )


def _line() -> str:
    """The innermost line of the program; "" where PyTorch's modules and this package are all that runs."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGES):
        if frame.f_code.co_name == "_step" and frame.f_code.co_filename.startswith(HERE):
            return ""
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
