"""The path to an item of an object, for an error. It walks the object again, but only after a refusal."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

from unisono.engine.encoding.class_registry import field_names

__all__ = ["path_to"]


def path_to(root: Any, culprit: Any) -> str:
    """The place of `culprit` in `root`, "" when it is the root itself.

    Example: path_to({"a": [1, 2, thing]}, thing) == "['a'][2]"
    """
    seen: set[int] = set()
    pending = [("", root)]
    while pending:
        path, obj = pending.pop()
        if obj is culprit:
            return path
        if id(obj) not in seen:
            seen.add(id(obj))
            pending += [(path + label, child) for label, child in reversed(list(_children(obj)))]
    return ""


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    """The items of an object in the order of encoding, each with its Python expression."""
    if type(obj) in (list, tuple):
        for index, child in enumerate(obj):
            yield f"[{index}]", child
    elif type(obj) is dict:
        for key, child in obj.items():
            yield f" (key {reprlib.repr(key)})", key
            yield f"[{reprlib.repr(key)}]", child
    elif type(obj) in (set, frozenset):
        for child in obj:
            yield " (element)", child
    else:
        for name in field_names(type(obj)) or ():
            yield f".{name}", getattr(obj, name, None)
