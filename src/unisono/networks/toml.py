"""TOML files as tables: their size, their text and their syntax are checked; what they say is not."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["tables_of", "text_of"]

MOST_BYTES = 64 << 20


def text_of(file: Path) -> str:
    """The text of a file.

    Raises:
        OSError: the file cannot be read.  ValueError: it is too large or not UTF-8.
    """
    with file.open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{file}: is larger than {MOST_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{file}:{line}: is not UTF-8: {error.reason}") from None


def tables_of(text: str, file: str) -> dict[str, Any]:
    """The tables of a text; `file` is for messages.

    Raises:
        ValueError: it is no TOML; the message names the file and the line.
        ModuleNotFoundError: Python 3.10 without the package tomli.
    """
    try:
        tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "reading TOML on Python 3.10 needs the package tomli: pip install 'unisono[networks]'",
            name="tomli",
        ) from None
    try:
        found: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = where[1] if where else str(text.count("\n") + 1)
        reason = re.sub(r" \(at .*\)$", "", str(error))
        raise ValueError(f"{file}:{line}: {reason}") from None
    except RecursionError:
        raise ValueError(f"{file}:1: is nested too deeply") from None
    except ValueError as error:  # a number of too many digits
        raise ValueError(f"{file}: {error}") from None
    return found
