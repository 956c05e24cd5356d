"""One dispatch mode records a step without values. Its graph, its seconds and its bytes are readings of it.

    reading                                        of an operator               of a call of a module
    Recorder        graph/capture.py               its values and arguments     what it takes and returns
    TimedStep       costs/trace.py                 its class and size           its bytes, its unit
    StorageWatch    planning/memory_account.py     the storages that it makes   its path

A step is read by one of them at a time: a graph is of one forward, seconds are of a step that all plans
share, bytes are of one rank under one plan. See docs/adr/0026-one-trace-of-a-step.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from unisono.torch_internals.fake import OperatorMode, number_read

PACKAGES = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[2]) + os.sep)


class Pause:
    """A context, which may be entered again. It is true within."""

    def __init__(self) -> None:
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


class StepTrace(OperatorMode):
    """Sees each operator and each call of a module.

    Attributes:
        phase: of the step, such as "forward".
        paused: within it, what runs is no part of the step.
        numbers: a number that is read from a tensor is 1, or this one; None: such a program raises.
    """

    def __init__(self, phase: str = "forward") -> None:
        super().__init__()
        self.phase, self.paused = phase, Pause()
        self.numbers: float | None = None

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if self.paused:
            return op(*args, **named)
        if self.numbers is not None and (number := number_read(op, args, self.numbers)) is not None:
            return number
        return self.operator(op, args, named)

    def operator(self, op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run one operator, and read it."""
        raise NotImplementedError

    def begin(self, path: str, module: nn.Module, args: Any, named: Any) -> None:
        """A call of a module begins."""

    def end(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        """It ends."""

    def follow(self, modules: Iterable[tuple[str, nn.Module]], *, always: bool = False) -> ExitStack:
        """See the calls of these modules until what it returns closes. `always`: also the end by an error."""
        ends = ExitStack()
        for path, module in modules:  # functions, which a copy of the module shares
            before = lambda module, args, named, path=path: self.begin(path, module, args, named)  # noqa: E731
            after = lambda module, args, output, path=path: self.end(path, module, args, output)  # noqa: E731
            ends.callback(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
            ends.callback(module.register_forward_hook(after, always_call=always).remove)
        return ends

    @contextmanager
    def having(self, **values: Any) -> Iterator[None]:
        """Have attributes with other values."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


def program_frame(ends: Callable[[CodeType], bool] = lambda _: False) -> FrameType | None:
    """Where the program is, outside PyTorch and this package. `ends`: code around which it is nowhere."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGES):
        frame = None if ends(frame.f_code) else frame.f_back
    return frame
