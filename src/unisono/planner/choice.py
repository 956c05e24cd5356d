"""The answer of a search for plans: the chosen one, others, and why not those one step away.

It is shown as text, and as one page of HTML that needs no network and no script. The picture of the page is
the trade: the time of a step over the memory of a rank. `PlanChoice` is that of a model's numbers, and
`unisono.parallel.ModelChoice` that of a recorded model.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple

from unisono.networks.quantities import readable_size, readable_time, signed_time

__all__ = [
    "Choice",
    "ChoicePage",
    "PricedCollective",
    "RefusedPlan",
    "TradePoint",
    "nearest_first",
    "trade_svg",
]

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
    """All calls of one kind in a step, on one rank.

    Attributes:
        collective: such as all_reduce; "send" and "message" are one to the next stage, or along a ring.
        axis: data, replica, expert, context, tensor or pipeline.    ranks: of a call.
        nbytes: of one call; where calls differ, as those of a recorded model, of all.
        calls: may be a part of one, under local_steps.
        seconds: of all calls.    exposed: those that nothing hides; None: they are not known.
    """

    collective: str
    axis: str
    ranks: int
    nbytes: float
    calls: float
    seconds: float
    exposed: float | None = None

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
    """What the page shows. Seconds and bytes.

    Attributes:
        title: what is trained, on what.  summary: sentences below the plan.
        time, memory: parts by cause; their sums are those of the chosen point.
        limit_bytes: what a rank may use.  fits: whether the chosen plan does.
        limit: the part of the time that is largest.
        others: further plans that fit, the fastest first.
        refused: the plans one step away: what changes, and the byte or second that refuses it.
        points: of the picture; groups: their colours' legend.
    """

    title: str
    chosen: TradePoint
    summary: Sequence[str]
    time: Mapping[str, float]
    memory: Mapping[str, float]
    limit_bytes: float
    fits: bool
    limit: str
    collectives: Sequence[PricedCollective]
    others: Sequence[TradePoint]
    refused: Sequence[tuple[str, str]]
    points: Sequence[TradePoint]
    groups: Mapping[str, str]

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


# ---- a choice --------------------------------------------------------------------------------------------

ROUNDING = 1e-9
"""Seconds; plans that differ by less are as fast."""


class RefusedPlan(NamedTuple):
    """A plan one step away from the chosen one.

    Attributes:
        change: the fields that differ, such as "zero=1".    problem: why it cannot be run; "" if it can.
            The bytes and seconds that are known are beside it.
        excess_bytes: memory above the limit; 0: it fits, or its seconds refuse it already.
        excess_s: seconds more than the chosen plan's; below 0 where it is faster and does not fit. None: its
            seconds are not known.
        cause: the part of the step that grows most, and of a model's numbers its seconds; of a recorded model
            the part of the memory, if it does not fit.
    """

    change: str
    problem: str
    excess_bytes: int
    excess_s: float | None
    cause: Any


def nearest_first(refused: Iterable[RefusedPlan]) -> list[RefusedPlan]:
    """Those that memory refuses first, then the nearest; last those that cannot be run."""
    return sorted(refused, key=lambda each: (bool(each.problem), not each.excess_bytes, each.excess_s or 0.0))


@dataclass(frozen=True)
class Choice:
    """A plan, priced, with its reasons. `print` shows it on a screen.

    Attributes:
        chosen: the plan, its time and its memory, by cause.
        collectives: of a step on a rank, those that take longest first.
        next_best: up to five others that fit.  refused: the plans one step away.
        candidates: the plans that were compared.
    """

    chosen: Any
    collectives: list[PricedCollective]
    next_best: list[Any]
    refused: list[RefusedPlan]
    candidates: int

    NAMES: ClassVar[Mapping[str, str]] = {}
    """Causes as people read them; other causes are as they are called."""

    ALWAYS: ClassVar[frozenset[str]] = frozenset()
    """Parts of a step that are shown though they take no time."""

    WIDTH: ClassVar[int] = 120
    """Columns of the text."""

    RECORDED: ClassVar[tuple[str, ...]] = (
        "seconds",
        "limit",
        "memory_bytes",
        "limit_bytes",
        "fits",
        "candidates",
    )
    """What is in a record as it is called here."""

    @property
    def plan(self) -> Any:
        """The plan."""
        return self.chosen.plan

    @property
    def seconds(self) -> float:
        """A step, as predicted."""
        return float(self.chosen.time.total)

    @property
    def memory_bytes(self) -> int:
        """Of the fullest rank."""
        return int(self.chosen.memory_bytes)

    @property
    def limit_bytes(self) -> int:
        """What the fullest rank may use; where hosts differ, the one that has least to spare."""
        return int(self.chosen.limit_bytes)

    @property
    def fits(self) -> bool:
        """Whether a rank has this memory."""
        return not self.chosen.excess_bytes

    @property
    def limit(self) -> str:
        """The cause that takes the largest share of the step."""
        return max(self.chosen.seconds.items(), key=lambda item: item[1])[0]

    def record(self) -> dict[str, Any]:
        """All of it as JSON has it; seconds and bytes. docs/planner.md lists the fields."""
        chosen = self.chosen
        return {
            **{name: getattr(self, name) for name in self.RECORDED},
            "plan": self._fields(chosen.plan),
            "time": dict(chosen.seconds),
            "memory": {name: round(value) for name, value in chosen.parts.items()},
            "collectives": [{**each._asdict(), "nbytes": round(each.nbytes)} for each in self.collectives],
            "next_best": [
                {
                    "plan": self._fields(each.plan),
                    "seconds": each.time.total,
                    "memory_bytes": each.memory_bytes,
                }
                for each in self.next_best
            ],
            "refused": [each._asdict() for each in self.refused],
        }

    def html(self, plans: Iterable[Any] = ()) -> str:
        """One page with all of it, which needs no network. `plans`: further points of its picture."""
        return self.page(plans).html()

    def page(self, plans: Iterable[Any] = ()) -> ChoicePage:
        """What that page shows."""
        seconds, names = self.chosen.seconds, self.NAMES
        points = [self.point(each) for each in (self.chosen, *self.next_best, *plans)]
        return ChoicePage(
            title=self._title(),
            chosen=points[0],
            summary=[*self._about(), *self._beside()],
            time={
                names.get(name, name): value
                for name, value in seconds.items()
                if value or name in self.ALWAYS
            },
            memory={names.get(name, name): value for name, value in self.chosen.parts.items()},
            limit_bytes=self.limit_bytes,
            fits=self.fits,
            limit=names.get(self.limit, self.limit),
            collectives=self.collectives,
            others=points[1 : 1 + len(self.next_best)],
            refused=[(each.change, self._refusal(each)) for each in self.refused],
            points=points,
            groups={point.group: f"recompute={point.group}" for point in points},
        )

    def point(self, each: Any) -> TradePoint:
        """A priced plan in the picture."""
        plan = each.plan
        change = self._change(plan) if each is not self.chosen else ""
        return TradePoint(str(plan), each.time.total, each.memory_bytes, str(plan.recompute), change)

    def __str__(self) -> str:
        shown = (self.plan, *self._about(), self._memory(), *self._beside())
        lines = [self._title(), *(f"  {line}" for line in shown), "", *self.page().lines()]
        return "\n".join(part for line in lines for part in _folded(line, self.WIDTH))

    def _refusal(self, each: RefusedPlan) -> str:
        """The byte or the second that refuses a neighbour."""
        name, grown = each.cause if isinstance(each.cause, tuple) else (each.cause, None)
        more = "" if grown is None else f" {signed_time(grown)}"
        why = f" ({self.NAMES.get(name, name)}{more})" if name else ""
        words = [each.problem] if each.problem else []
        if each.excess_bytes:
            of_memory = why if name in self.chosen.parts else ""
            words.append(f"{readable_size(each.excess_bytes)} too many{of_memory}")
        if each.excess_s is not None:
            slower = signed_time(each.excess_s) + ("" if each.excess_bytes else why)
            words.append("as fast" if abs(each.excess_s) < ROUNDING else slower)
        return "; ".join(words)

    # ---- of each kind of choice ----

    def _fields(self, plan: Any) -> Any:
        """A plan in a record."""
        return str(plan)

    def _change(self, plan: Any) -> str:
        """The fields in which a plan differs from the chosen one."""
        raise NotImplementedError

    def _title(self) -> str:
        """What is trained, on what."""
        raise NotImplementedError

    def _about(self) -> Iterator[str]:
        """Sentences on the plan, and where prices come from."""
        raise NotImplementedError

    def _memory(self) -> str:
        """A sentence on the fullest rank."""
        raise NotImplementedError

    def _beside(self) -> Iterator[str]:
        """Further sentences."""
        raise NotImplementedError


def _folded(line: str, width: int) -> list[str]:
    """A line in parts that fit a screen."""
    if len(line) <= width:
        return [line]
    indent = " " * (4 + len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
