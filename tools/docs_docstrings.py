"""An extension of griffe, which parses docstrings for the site: sections need no blank line before them.

In the sources "Args:" and "Raises:" follow each other directly; the parser would take the second for text.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"\n(?=(?:Args|Raises|Returns|Yields|Attributes):\n)")


class Sections(griffe.Extension):
    """Separates the sections of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Add the blank lines."""
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub("\n\n", obj.docstring.value)
