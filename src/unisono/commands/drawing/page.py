"""The diagram as a page: the rounds one by one, forward and back, in one file that needs no network."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from unisono.commands.drawing.colours import COLOURS, variables
from unisono.commands.drawing.diagram import svg
from unisono.commands.drawing.trace import PlanTrace

__all__ = ["html"]


def html(picture: PlanTrace) -> str:
    """The page as text.

    Raises:
        ValueError: there are too many ranks, chunks or rounds for a readable picture.
    """
    data = json.dumps(picture.record(), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "@TITLE@": escape(str(picture.plan)),
        "@COLOURS@": variables(),
        "@NUMBER_OF_COLOURS@": str(COLOURS),
        "@DIAGRAM@": svg(picture),
        "@DATA@": data,
    }
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    for mark, part in parts.items():
        before, _, after = text.partition(mark)  # inserted text is not searched
        text = before + part + after
    return text
