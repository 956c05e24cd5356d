"""The operations of PyTorch's CUDA build, and its device checks of their arguments.

Read from `native_functions.yaml`, which comes with PyTorch (torchgen). It is read line by line: a YAML parser
takes ten seconds for it. The result is a C++ table, included by csrc/virtual/checks.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["CudaOperation", "operations", "table"]

HEAD = re.compile(r"^- func: (\w+)(?:\.(\w+))?\(")
FIELD = re.compile(r"^  (\w+): *([^#]*)")
KEYS = re.compile(r"^    ([\w, ]+):")


class CudaOperation(NamedTuple):
    """One operation with a CUDA kernel.

    `iterator`: its devices are checked by TensorIterator or by the kernel itself; otherwise each argument is
    compared with the first one, and errors name `method`.
    """

    name: str
    iterator: bool
    method: str


class _OperationEntry:
    def __init__(self, base: str, overload: str) -> None:
        self.base, self.overload = base, overload
        self.fields: dict[str, str] = {}
        self.keys: set[str] = set()

    @property
    def name(self) -> str:
        return f"{self.base}.{self.overload}" if self.overload else self.base


def operations(text: str) -> Iterator[CudaOperation]:
    """Yield the operations with a CUDA kernel, in the order of the file.

    Example: `- func: mm(...)` with `structured_delegate: mm.out` and `dispatch: CUDA: ...` there
    -> Operation("aten::mm", iterator=False, method="wrapper_CUDA_mm").
    """
    entries = {entry.name: entry for entry in _entries(text)}
    for entry in entries.values():
        delegate = entries.get(entry.fields.get("structured_delegate", ""), entry)
        if "CUDA" in delegate.keys or "ufunc_inner_loop" in delegate.fields:
            iterator = entry.fields.get("device_check") == "NoCheck"
            yield CudaOperation(f"aten::{entry.name}", iterator, _method(entry))


def table(text: str) -> str:
    """Return the rows of the C++ table."""
    return "".join(
        f'{{"{op.name}", "{op.method}", {str(op.iterator).lower()}}},\n' for op in operations(text)
    )


def _entries(text: str) -> Iterator[_OperationEntry]:
    entry = _OperationEntry("", "")
    for line in text.splitlines():
        if head := HEAD.match(line):
            entry = _OperationEntry(head[1], head[2] or "")
            yield entry
        elif field := FIELD.match(line):
            entry.fields[field[1]] = field[2].strip()
        elif keys := KEYS.match(line):
            entry.keys.update(key.strip() for key in keys[1].split(","))


def _method(entry: _OperationEntry) -> str:
    """Return the C++ function that PyTorch's error names: torchgen's `wrapper_CUDA_...`."""
    structured = "structured_delegate" in entry.fields or entry.fields.get("structured") == "True"
    if structured:
        return f"wrapper_CUDA_{entry.base}" + (f"_{entry.overload}" if entry.overload.endswith("out") else "")
    return f"wrapper_CUDA_{entry.overload}_{entry.base}" + ("_out" if entry.overload.endswith("out") else "")
