"""What a choice shows: tables as text, and one page of HTML that needs no network and no script.

It is plain data, which a `Choice` fills in. The picture of the page is the trade: the time of a step over the
memory of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import zip_longest
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
    """A plan: its name, seconds of a step, bytes of the fullest rank, and the group that has its colour.

    `change`: the fields in which it differs from the chosen one.
    """

    name: str
    seconds: float
    memory_bytes: float
    group: str = ""
    change: str = ""


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
        PICTURE_STYLE,
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


MOST_COLLECTIVES, MOST_REFUSED = 5, 8
WIDEST_CHANGE, COLUMNS = 40, (7, 12, 10, 11, 12)
"""Of the tables as text."""

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

    @property
    def cells(self) -> tuple[str, ...]:
        """Its numbers, as tables show them."""
        whole = self.calls == round(self.calls)
        calls = f"{round(self.calls):,}" if whole else f"{self.calls:.4g}"
        found = f"{self.ranks:,}", readable_size(self.nbytes), calls, readable_time(self.seconds)
        return found if self.exposed is None else (*found, readable_time(self.exposed))


class ChoicePage(NamedTuple):
    """What the page shows. Seconds and bytes."""

    title: str  # what is trained, on what
    chosen: TradePoint
    summary: Sequence[str]  # sentences below the plan
    time: Mapping[str, float]  # parts by cause, whose sum is that of the chosen point
    memory: Mapping[str, float]  # likewise
    limit_bytes: float  # what a rank may use
    fits: bool  # whether the chosen plan does
    limit: str  # the part of the time that is largest
    collectives: Sequence[PricedCollective]
    others: Sequence[TradePoint]  # further plans that fit, the fastest first
    refused: Sequence[tuple[str, str]]  # one step away: what changes, and the byte or second that refuses it
    points: Sequence[TradePoint]  # of the picture
    groups: Mapping[str, str]  # of its colours -> the legend

    def html(self) -> str:
        """The page."""
        return "\n".join([*self._head(), *self._trade(), *self._parts(), *self._tables(), "</html>", ""])

    def lines(self) -> Iterator[str]:
        """Its tables as text."""
        total, width = sum(self.time.values()), max(map(len, self.memory)) + 2
        left = [
            f"{name:<19}{readable_time(value):>9}{100 * value / total:>6.1f} %"
            for name, value in self.time.items()
        ]
        right = [f"{name:<{width}}{readable_size(value):>12}" for name, value in self.memory.items()]
        right.append(f"limit: {self.limit}")
        for one, other in zip_longest(left, right, fillvalue=""):
            yield f"  {one:<36}    {other}".rstrip()
        if self.collectives:
            yield f"  {'collectives of a rank':<26}{_columns(self.heads)}"
        yield from (
            f"    {_named(each):<24}{_columns(each.cells)}" for each in self.collectives[:MOST_COLLECTIVES]
        )
        if self.others:
            yield "  next best"
        for point in self.others:
            seconds, size = readable_time(point.seconds), readable_size(point.memory_bytes)
            yield f"    {seconds:>9}{size:>12}  {point.change}"
        if self.refused:
            yield "  one step away"
        shown = self.refused[:MOST_REFUSED]
        widest = min(WIDEST_CHANGE, max((len(change) for change, _ in shown), default=0))
        yield from (f"    {change:<{widest}}  {why}" for change, why in shown)

    @property
    def heads(self) -> tuple[str, ...]:
        """Of the columns of collectives."""
        known = any(each.exposed is not None for each in self.collectives)
        return ("ranks", "bytes", "calls", "time", *["not hidden"] * known)

    def _head(self) -> Iterator[str]:
        state = "fits" if self.fits else '<span class="bad">DOES NOT FIT</span>'
        held, limit = readable_size(self.chosen.memory_bytes), readable_size(self.limit_bytes)
        used = f"{held} of {limit} on the fullest rank"
        yield '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">'
        yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
        yield f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>"
        yield f"<h1>{escape(self.title)}</h1>\n<p><code>{escape(self.chosen.name)}</code></p>"
        yield f"<p>{readable_time(self.chosen.seconds)} a step. {used}: {state}.</p>"
        yield from (f"<p>{escape(line)}</p>" for line in self.summary)

    def _trade(self) -> Iterator[str]:
        yield "<h2>Time over memory</h2>"
        title = f"{len(self.points):,} plans: seconds of a step over memory of a rank"
        yield trade_svg(title, self.chosen, self.points, self.limit_bytes, self.groups)

    def _parts(self) -> Iterator[str]:
        yield '<div class="two">'
        for title, parts, shown in (
            ("A step", self.time, readable_time),
            ("Memory", self.memory, readable_size),
        ):
            total = sum(parts.values()) or 1.0
            yield f"<div><h2>{title}</h2><table>"
            for name, value in ((name, value) for name, value in parts.items() if value):
                bar = f'<div class="bar" style="width:{100 * max(0.0, value) / total:.1f}%"></div>'
                yield _row([escape(name), shown(value), f"{value / total:.1%}", bar], numbers=(1, 2))
            yield "</table></div>"
        yield "</div>"

    def _tables(self) -> Iterator[str]:
        if self.collectives:
            yield "<h2>Collectives of a rank</h2><table>"
            yield _row(("collective", *self.heads), numbers=range(1, 6), cell="th")
            for each in self.collectives:
                yield _row([escape(_named(each)), *each.cells], numbers=range(1, 6))
            yield "</table>"
        if self.others:
            yield "<h2>Next best</h2><table>"
            for point in self.others:
                texts = [readable_time(point.seconds), readable_size(point.memory_bytes), escape(point.name)]
                yield _row(texts, numbers=(0, 1))
            yield "</table>"
        if self.refused:
            yield "<h2>One step away</h2><table>"
            yield from (_row([escape(text) for text in each]) for each in self.refused)
            yield "</table>"


def _named(each: PricedCollective) -> str:
    return f"{each.collective} ({each.axis})"


def _columns(texts: Sequence[str]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(texts, COLUMNS, strict=False))


def _row(texts: Sequence[str], *, numbers: Sequence[int] = (), cell: str = "td") -> str:
    cells = "".join(
        f"<{cell}{' class=n' if at in numbers else ''}>{text}</{cell}>" for at, text in enumerate(texts)
    )
    return f"<tr>{cells}</tr>"
