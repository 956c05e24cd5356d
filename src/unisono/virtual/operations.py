"""The operations of PyTorch's CUDA build, and its device checks of their arguments.

Read from `native_functions.yaml`, which comes with PyTorch (torchgen). It is read line by line: a YAML parser
takes ten seconds for it. The result is a C++ table, included by csrc/virtual/checks.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

HEAD = re.compile(r"(\w+)(?:\.(\w+))?\(")
FIELD = re.compile(r"^  (\w+): *([^#\n]*)", re.MULTILINE)
KEYS = re.compile(r"^    ([\w, ]+):", re.MULTILINE)


class CudaOperation(NamedTuple):
    """One operation with a CUDA kernel.

    `iterator`: its devices are checked by TensorIterator or by the kernel itself; otherwise each argument is
    compared with the first one, and errors name `method`.
    """

    name: str
    iterator: bool
    method: str


class _OperationEntry(NamedTuple):
    base: str
    overload: str
    fields: dict[str, str]
    keys: set[str]


def operations(text: str) -> Iterator[CudaOperation]:
    """Yield the operations with a CUDA kernel, in the order of the file.

    Example: `- func: mm(...)` with `structured_delegate: mm.out` and `dispatch: CUDA: ...` there
    -> Operation("aten::mm", iterator=False, method="wrapper_CUDA_mm").
    """
    entries = {f"{each.base}.{each.overload}".rstrip("."): each for each in _entries(text)}
    for name, entry in entries.items():
        delegate = entries.get(entry.fields.get("structured_delegate", ""), entry)
        if "CUDA" in delegate.keys or "ufunc_inner_loop" in delegate.fields:
            iterator = entry.fields.get("device_check") == "NoCheck"
            yield CudaOperation(f"aten::{name}", iterator, _method(entry))


def table(text: str) -> str:
    """Return the rows of the C++ table."""
    return "".join(
        f'{{"{op.name}", "{op.method}", {str(op.iterator).lower()}}},\n' for op in operations(text)
    )


def _entries(text: str) -> Iterator[_OperationEntry]:
    for block in text.split("\n- func: ")[1:]:
        head = HEAD.match(block)
        if head:
            keys = {key.strip() for found in KEYS.findall(block) for key in found.split(",")}
            fields = {name: value.strip() for name, value in FIELD.findall(block)}
            yield _OperationEntry(head[1], head[2] or "", fields, keys)


def _method(entry: _OperationEntry) -> str:
    """Return the C++ function that PyTorch's error names: torchgen's `wrapper_CUDA_...`."""
    structured = "structured_delegate" in entry.fields or entry.fields.get("structured") == "True"
    if structured:
        return f"wrapper_CUDA_{entry.base}" + (f"_{entry.overload}" if entry.overload.endswith("out") else "")
    return f"wrapper_CUDA_{entry.overload}_{entry.base}" + ("_out" if entry.overload.endswith("out") else "")
