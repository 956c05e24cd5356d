"""What the text and the page of a `Choice` are made of: rows of tables, and the picture of its trade.

That is the time of a step over the memory of a rank. It needs no network and no script.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from unisono.networks.quantities import readable_size, readable_time

WIDTH, HEIGHT, EDGE = 900, 560, 64
GIB = 1 << 30
CELL = 6
"""Pixels: of plans that fall into one cell the fastest is drawn."""

SPAN = 8
"""Plans that take so many times as long as the chosen one are left out, and those far from its memory."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
PICTURE_STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#1b1f24}.t{font-size:15px;font-weight:600}"
    ".a{stroke:#5b6570}.l{stroke:#D55E00;stroke-dasharray:5 4}.b{fill:none;stroke:#D55E00;stroke-width:2}"
    "circle{fill-opacity:.75}@media(prefers-color-scheme:dark){text{fill:#e8ebef}.a{stroke:#9aa5b1}}</style>"
)


class TradePoint(NamedTuple):
    """A plan: its name, seconds of a step, bytes of the fullest rank; `group`: what it computes again."""

    name: str
    seconds: float
    memory_bytes: float
    group: str


def trade_svg(title: str, points: Sequence[TradePoint], limit_bytes: float) -> str:
    """The drawing: each point names its plan; the ring is the first one, the line the limit of memory."""
    chosen, groups = points[0], [*dict.fromkeys(each.group for each in points)]
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
        PICTURE_STYLE,
        f'<text class="t" x="{EDGE}" y="22">{escape(title)}</text>',
    ]
    colours = dict(zip(groups, COLOURS * (1 + len(groups) // len(COLOURS)), strict=False))
    for at, group in enumerate(groups):
        lines.append(f'<circle cx="{EDGE + 6 + 150 * at}" cy="38" r="4" fill="{colours[group]}"/>')
        lines.append(f'<text x="{EDGE + 16 + 150 * at}" y="42">recompute={escape(group)}</text>')
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


COLUMNS = 7, 12, 10, 11, 12
"""Widths of the table of collectives as text."""

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}
td,th{padding:.2rem .6rem;text-align:left;border-bottom:1px solid #8884;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.bar{background:#0072B2;height:.7rem;border-radius:2px}
.two{display:grid;grid-template-columns:1fr 1fr;gap:2rem}
@media(max-width:50rem){.two{grid-template-columns:1fr}}
.bad{color:#D55E00;font-weight:600}svg{width:100%;height:auto}
"""


class PricedCollective(NamedTuple):
    """All calls of one kind in a step, on one rank."""

    collective: str  # such as all_reduce; "send" and "message" are one to the next stage, or along a ring
    axis: str  # data, replica, expert, context, tensor or pipeline
    ranks: int  # of a call
    nbytes: float  # of one call; where calls differ, as those of a recorded model, of all
    calls: float  # may be a part of one, under local_steps
    seconds: float  # of all calls
    exposed: float | None = None  # those that nothing hides; None: they are not known

    def times(self, share: float) -> PricedCollective:
        """So often; `nbytes` are those of all calls."""
        return self._replace(
            nbytes=self.nbytes * share, calls=self.calls * share, seconds=self.seconds * share
        )

    def plus(self, more: PricedCollective, times: int = 1) -> PricedCollective:
        """With other calls of as many bytes, both so often."""
        calls, seconds = times * (self.calls + more.calls), times * (self.seconds + more.seconds)
        exposed = times * ((self.exposed or 0.0) + (more.exposed or 0.0))
        return self._replace(calls=calls, seconds=seconds, exposed=exposed)

    @property
    def cells(self) -> tuple[str, ...]:
        """Its numbers, as tables show them."""
        whole = self.calls == round(self.calls)
        calls = f"{round(self.calls):,}" if whole else f"{self.calls:.4g}"
        found = f"{self.ranks:,}", readable_size(self.nbytes), calls, readable_time(self.seconds)
        return found if self.exposed is None else (*found, readable_time(self.exposed))


def named(each: PricedCollective) -> str:
    """Its row's head."""
    return f"{each.collective} ({each.axis})"


def columns(texts: Sequence[str]) -> str:
    """Cells of collectives as text."""
    return "".join(f"{text:>{width}}" for text, width in zip(texts, COLUMNS, strict=False))


def row(texts: Sequence[str], *, numbers: Sequence[int] = (), cell: str = "td") -> str:
    """A row of a table of HTML. `numbers`: columns at the right."""
    cells = "".join(
        f"<{cell}{' class=n' if at in numbers else ''}>{text}</{cell}>" for at, text in enumerate(texts)
    )
    return f"<tr>{cells}</tr>"
