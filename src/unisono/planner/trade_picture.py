"""The trade as SVG: the time of a step over the memory of a rank, for any plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import NamedTuple

from unisono.planner.readable import readable_size

__all__ = ["TradePoint", "trade_svg"]

WIDTH, HEIGHT, EDGE = 900, 560, 64
GIB = 1 << 30
CELL = 6
"""Pixels: of plans that fall into one cell the fastest is drawn."""

SPAN = 8
"""Plans that take so many times as long as the chosen one are left out, and those far from its memory."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#1b1f24}.t{font-size:15px;font-weight:600}"
    ".a{stroke:#5b6570}.l{stroke:#D55E00;stroke-dasharray:5 4}.b{fill:none;stroke:#D55E00;stroke-width:2}"
    "circle{fill-opacity:.75}@media(prefers-color-scheme:dark){text{fill:#e8ebef}.a{stroke:#9aa5b1}}</style>"
)


class TradePoint(NamedTuple):
    """A plan: its name, seconds of a step, bytes of the fullest rank, and the group that has its colour."""

    name: str
    seconds: float
    memory_bytes: float
    group: str = ""


def trade_svg(
    title: str,
    chosen: TradePoint,
    points: Iterable[TradePoint],
    limit_bytes: float,
    groups: Mapping[str, str],
) -> str:
    """The drawing: each point names its plan; the ring is the chosen one, the line the limit of memory.

    Args:
        groups: of the points, in the order of their colours -> the text of the legend.
    """
    needed = chosen.memory_bytes
    x_low, x_high = min(needed, limit_bytes) / SPAN, max(needed, limit_bytes) * SPAN / 2
    x_axis = _LogScale(x_low, x_high, 1 / GIB, EDGE, WIDTH - 20, "GiB")
    y_axis = _LogScale(chosen.seconds / 1.5, chosen.seconds * SPAN, 1.0, HEIGHT - EDGE, 60, "s")
    cells: dict[tuple[int, int], TradePoint] = {}
    for each in points:
        x, y = x_axis.at(each.memory_bytes), y_axis.at(each.seconds)
        if EDGE <= x <= WIDTH - 20 and 60 <= y <= HEIGHT - EDGE:
            cell = int(x / CELL), int(y / CELL)
            cells[cell] = min(cells.get(cell, each), each, key=lambda point: point.seconds)
    limit = x_axis.at(limit_bytes)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        STYLE,
        f'<text class="t" x="{EDGE}" y="22">{escape(title)}</text>',
    ]
    colours = dict(zip(groups, COLOURS * (1 + len(groups) // len(COLOURS)), strict=False))
    for at, (group, text) in enumerate(groups.items()):
        lines.append(f'<circle cx="{EDGE + 6 + 150 * at}" cy="38" r="4" fill="{colours[group]}"/>')
        lines.append(f'<text x="{EDGE + 16 + 150 * at}" y="42">{escape(text)}</text>')
    lines += _scales(x_axis, y_axis)
    lines.append(f'<line class="l" x1="{limit:.1f}" x2="{limit:.1f}" y1="60" y2="{HEIGHT - EDGE}"/>')
    for each in cells.values():
        x, y = x_axis.at(each.memory_bytes), y_axis.at(each.seconds)
        name = f"{each.name}: {each.seconds:.4g} s, {readable_size(each.memory_bytes)}"
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colours.get(each.group, COLOURS[0])}">'
            f"<title>{escape(name)}</title></circle>"
        )
    x, y = x_axis.at(needed), y_axis.at(chosen.seconds)
    lines.append(f'<circle class="b" cx="{x:.1f}" cy="{y:.1f}" r="7"/>')
    return "\n".join([*lines, "</svg>\n"])


class _LogScale:
    """A logarithmic axis from `low` to `high`, between two pixels."""

    def __init__(self, low: float, high: float, scale: float, first: float, last: float, unit: str) -> None:
        self.low, self.high = low, high
        self.scale, self.first, self.last, self.unit = scale, first, last, unit

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[tuple[float, str]]:
        """Pixels and labels: 1, 2 and 5 of each decade."""
        found = []
        for decade in range(-9, 10):
            for digit in (1, 2, 5):
                value = digit * 10.0**decade / self.scale
                if self.low <= value <= self.high:
                    found.append((self.at(value), f"{value * self.scale:g} {self.unit}"))
        return found


def _scales(x_axis: _LogScale, y_axis: _LogScale) -> list[str]:
    bottom = HEIGHT - EDGE
    lines = [
        f'<line class="a" x1="{EDGE}" x2="{WIDTH - 20}" y1="{bottom}" y2="{bottom}"/>',
        f'<line class="a" x1="{EDGE}" x2="{EDGE}" y1="60" y2="{bottom}"/>',
    ]
    for x, label in x_axis.ticks():
        lines.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{label}</text>')
    for y, label in y_axis.ticks():
        lines.append(f'<text x="{EDGE - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    return lines
