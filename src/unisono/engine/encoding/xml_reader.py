"""XML as elements with their lines. A declaration of an entity is refused, so none expands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.parsers import expat

__all__ = ["Element", "parse", "read"]

MOST_BYTES = 64 << 20
MOST_ELEMENTS = 1 << 20
MOST_DEPTH = 64


class Element:
    """An element: its name, attributes, line, and the elements in it."""

    def __init__(self, file: str, name: str, attributes: dict[str, str], line: int) -> None:
        self.file, self.name, self.attributes, self.line = file, name, attributes, line
        self.children: list[Element] = []

    def error(self, text: str) -> ValueError:
        """What is wrong with it."""
        return ValueError(f"{self.file}:{self.line}: <{self.name}>: {text}")

    def all(self, name: str) -> Iterator[Element]:
        """The elements of this name directly in it."""
        return (child for child in self.children if child.name == name)

    def text(self, key: str, default: str | None = None) -> str:
        """An attribute.

        Raises:
            ValueError: it is missing and has no default.
        """
        value = self.attributes.get(key, default)
        if value is None:
            raise self.error(f"lacks {key}=")
        return value

    def whole(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """An attribute that is a whole number.

        Raises:
            ValueError: it is missing without a default, no whole number, or out of range.
        """
        text = self.attributes.get(key)
        if text is None and default is not None:
            return default
        text = self.text(key)
        if not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text, re.ASCII):
            raise self.error(f"{key} is {text[:40]!r}, expected a whole number")
        if not least <= int(text) <= most:
            raise self.error(f"{key} is {int(text)}, expected {least}..{most}")
        return int(text)


def read(file: str | Path, root: str) -> Element:
    """The root element of a file, whose name has to be `root`, if that is given.

    Raises:
        OSError: the file cannot be read.  ValueError: it is no XML, or something else.
    """
    with Path(file).open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    return parse(data, root, str(file))


def parse(data: bytes, root: str, file: str = "schedule.xml") -> Element:
    """As `read`, from the bytes of the file.

    Raises:
        ValueError: it is no XML, or something else; the message names the file and the line.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"{file}: is larger than {MOST_BYTES >> 20} MiB")
    parser = expat.ParserCreate()
    parser.buffer_text = True
    top = Element(file, "", {}, 0)
    stack, count = [top], 0

    def refuse(text: str) -> None:
        raise ValueError(f"{file}:{parser.CurrentLineNumber}: {text}")

    def begin(name: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > MOST_ELEMENTS or len(stack) > MOST_DEPTH:
            refuse(f"has more than {MOST_ELEMENTS} elements, or {MOST_DEPTH} within each other")
        element = Element(file, name, attributes, parser.CurrentLineNumber)
        if len(stack) == 1 and root and name != root:
            refuse(f"is <{name[:40]}>, expected <{root}>")
        stack[-1].children.append(element)
        stack.append(element)

    parser.StartElementHandler = begin
    parser.EndElementHandler = lambda _: stack.pop()
    parser.EntityDeclHandler = lambda *_: refuse("declares an entity, which is not read")
    try:
        parser.Parse(data, True)
    except (LookupError, UnicodeError) as error:
        raise ValueError(f"{file}:{parser.CurrentLineNumber}: {error}") from None
    except expat.ExpatError as error:
        raise ValueError(f"{file}:{error.lineno}: {expat.ErrorString(error.code)}") from None
    return top.children[0]
