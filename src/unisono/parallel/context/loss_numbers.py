"""What a recorded loss reads: an annealed weight in a global name, an attribute, a schedule.

The program has such numbers as constants, and tensors that the loss was not given as they were. Before each
step the loss runs again on shapes, and where it reads others the program is recorded anew.
"""

from __future__ import annotations

import ctypes
import dis
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from unisono.parallel.graph.containers import mapped, tensors_in
from unisono.parallel.graph.step_trace import StepTrace
from unisono.parallel.program_state import COUNTS
from unisono.torch_internals.fake import fake_mode, is_fake, memory_of

from .call import ContextError

NUMBERS: Any = (bool, int, float, complex, str)


class _NumbersRead(StepTrace):
    """Notes the operators that run, with their numbers, and the memory of tensors that the loss has itself.

    Args:
        known: such memory by its address, and a number for each, which is equal on all ranks.
        fresh: further numbers.
    """

    def __init__(self, known: dict[int, tuple[Any, int]], fresh: Iterator[int]) -> None:
        super().__init__()
        self.noted: list[Any] = []
        self.read: dict[int, tuple[Any, int]] = {}
        self._known, self._fresh = known, fresh

    def operator(self, op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run one operator, and note what it reads."""
        own = [self._own(op, each) for each in tensors_in((args, named)) if not is_fake(each)]
        self.noted.append((str(op), *map(repr, tensors_in((args, named), NUMBERS)), *own))
        return op(*args, **named)

    def _own(self, func: Any, tensor: Tensor) -> Any:
        storage, _ = memory_of(tensor)
        at = storage.data_ptr()
        if func is torch.ops.aten.lift_fresh.default and tensor.device.type == "cpu":  # torch.tensor(number)
            # an operator would give no values here
            return zlib.crc32((ctypes.c_char * storage.nbytes()).from_address(at))
        if at not in self.read:
            self.read[at] = self._known.get(at) or (storage, next(self._fresh))
        return self.read[at][1], tensor.shape, tensor.stride(), tensor.storage_offset()


@cache
def _imports(code: CodeType) -> bool:
    return any(one.opname == "IMPORT_NAME" for one in dis.get_instructions(code))


def _reads_nothing(loss: Any) -> bool:
    """Whether a loss is a plain function that names nothing but PyTorch's modules and functions."""
    if getattr(loss, "__module__", "") == "torch.nn.functional":
        return True
    if not isinstance(loss, FunctionType) or loss.__closure__ or loss.__defaults__ or loss.__kwdefaults__:
        return False
    code, known = loss.__code__, (FunctionType, BuiltinFunctionType, ModuleType)
    if any(isinstance(one, CodeType) for one in code.co_consts) or _imports(code):
        return False
    named = [loss.__globals__[name] for name in code.co_names if name in loss.__globals__]
    homes = [
        one.__name__ if isinstance(one, ModuleType) else one.__module__
        for one in named
        if isinstance(one, known)
    ]
    return len(homes) == len(named) and all(str(home).split(".")[0] == "torch" for home in homes)


class LossNumbers:
    """What one loss reads, on the shapes with which it was recorded first.

    Attributes:
        last: what `read` has returned; it differs where the loss reads other numbers.
    """

    def __init__(self) -> None:
        self._mode, self.last = fake_mode(), 0
        self._proved = set[int]()
        self._given: Any = None
        self._fresh = itertools.count()
        self._tensors: dict[int, tuple[Any, int]] = {}  # they live, so that their addresses are theirs

    def note(self, output: Any, targets: Any) -> None:
        """Keep the shapes that the loss gets."""
        if self._given is None:  # made later: a recording would have the operators
            self._given = mapped(
                (output, targets),
                lambda t: partial(torch.empty_strided, t.shape, t.stride(), dtype=t.dtype, device=t.device),
            )

    def read(self, loss: Callable[[Any, Any], Any]) -> int:
        """Run the loss; return a number that differs where it reads others; 0: nothing is recorded yet."""
        self.last = 0 if self._given is None or _reads_nothing(loss) else self._read(loss)
        return self.last

    def _read(self, loss: Callable[[Any, Any], Any]) -> int:
        try:
            with torch.no_grad(), self._mode:
                given = mapped(self._given, lambda make: make(), partial)
                with _NumbersRead(self._tensors, self._fresh) as found:
                    loss(*given)
        except Exception as error:
            raise ContextError(
                f"the loss, which was recorded, does not run a second time: {type(error).__name__}: {error}"
            ) from error
        self._tensors = found.read
        return zlib.crc32(repr(found.noted).encode())

    def check(self, loss: Callable[[Any, Any], Any]) -> None:
        """Raise ContextError for a loss that reads other numbers each time, such as a count of its calls."""
        if not _reads_nothing(loss) and self._read(loss) != self._read(loss):
            raise ContextError(
                "the loss reads another number each time that it is called, such as a count of its calls, a "
                "clock or a random number, and context= records it. Have the loop change that number between "
                "steps, or give it in the targets"
            )

    def proved(self, loss: Callable[[Any, Any], Any], model: str) -> None:
        """A program has these numbers now: tell the user once that each new one costs a recording."""
        if not self.last:
            self.read(loss)
        warned = len(self._proved) > COUNTS
        self._proved.add(self.last)
        if len(self._proved) > COUNTS and not warned:
            warnings.warn(
                f"the loss of {model} reads a number that changes again and again: its program is "
                "recorded anew for each value, which takes seconds. Give the number in the targets, as a "
                "tensor with a row for each of theirs",
                stacklevel=2,
            )
