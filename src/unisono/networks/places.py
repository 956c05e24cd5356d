"""Where something stands in a TOML file: TOML readers do not keep the lines of values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["At", "DescriptionError", "line_of"]


class At(NamedTuple):
    """A place in the file: the path of keys and numbers to it, such as ("cable", 2, "rate")."""

    path: tuple[str | int, ...]

    def __truediv__(self, key: str | int) -> At:
        return At((*self.path, key))

    def __str__(self) -> str:
        text = ""
        for key in self.path:
            text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
        return text


class DescriptionError(ValueError):
    """What is wrong at a place of the file."""

    def __init__(self, at: At, text: str) -> None:
        super().__init__(text)
        self.at = at


MOST_COLUMNS = 512
"""Of a line that are looked at; names are shorter."""


def line_of(text: str, at: At) -> int:
    """The line of a place in a TOML text; that of the nearest enclosing one where it is not written out.

    Example: the second `rate` of two [[cable]] tables is At(("cable", 1, "rate")).
    """
    best, depth = 1, 0
    table: tuple[str | int, ...] = ()
    counts: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line[:MOST_COLUMNS]
        head = re.match(r"\s*(\[\[?)\s*([\w\-.\"' ]+?)\s*\]", line)
        key = re.match(r"\s*([\w\-]+|\"[^\"]*\"|'[^']*')\s*(?:\.|=)", line)
        if head:
            names = tuple(part.strip(" \"'") for part in head[2].split("."))
            if head[1] == "[[":
                counts[names] = counts.get(names, -1) + 1
            table = _numbered(names, counts)
            found = table
        elif key:
            found = (*table, key[1].strip("\"'"))
        else:
            continue
        common = 0
        while common < min(len(found), len(at.path)) and found[common] == at.path[common]:
            common += 1
        if common > depth and common == len(found):
            best, depth = number, common
    return best


def _numbered(names: tuple[str, ...], counts: Mapping[tuple[str, ...], int]) -> tuple[str | int, ...]:
    found: list[str | int] = []
    for number, name in enumerate(names, 1):
        found.append(name)
        if names[:number] in counts:
            found.append(counts[names[:number]])
    return tuple(found)
