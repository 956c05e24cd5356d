"""A choice of a plan as one page of HTML that needs no network and no script.

`ChoicePage` is plain data: a choice from a model's numbers fills one in (`PlanChoice.page`), and so may one
from a recorded model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from unisono.planner.readable import readable_size, readable_time
from unisono.planner.trade_picture import TradePoint, trade_svg
from unisono.planner.training_plan import RECOMPUTE

if TYPE_CHECKING:
    from unisono.planner.search import PricedPlan

__all__ = ["RECOMPUTE_GROUPS", "ChoicePage", "Neighbour", "PageCollective", "point_of"]

RECOMPUTE_GROUPS = {name: f"recompute={name}" for name in RECOMPUTE}
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


class PageCollective(NamedTuple):
    """One kind of collective of a step: bytes and seconds of all its calls, and those that nothing hides."""

    name: str
    ranks: int
    nbytes: float
    calls: int
    seconds: float
    exposed: float


class Neighbour(NamedTuple):
    """A plan one step away, and the byte or second that refuses it."""

    change: str
    why: str


class ChoicePage(NamedTuple):
    """What the page shows. Seconds and bytes.

    Attributes:
        title: what is trained, on what.  summary: sentences below the plan.
        time, memory: parts by cause; their sums are those of the chosen point.
        limit_bytes: what a rank may use.  fits: whether the chosen plan does.
        others: further plans that fit, the fastest first.  refused: the plans one step away.
        points: of the picture; groups: their colours' legend.
    """

    title: str
    chosen: TradePoint
    summary: Sequence[str]
    time: Mapping[str, float]
    memory: Mapping[str, float]
    limit_bytes: float
    fits: bool
    collectives: Sequence[PageCollective]
    others: Sequence[TradePoint]
    refused: Sequence[Neighbour]
    points: Sequence[TradePoint]
    groups: Mapping[str, str]

    def html(self) -> str:
        """The page."""
        return "\n".join([*self._head(), *self._trade(), *self._parts(), *self._tables(), "</html>", ""])

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
            heads = ("collective", "ranks", "bytes", "calls", "time", "not hidden")
            yield _row(heads, numbers=range(1, 6), cell="th")
            for each in self.collectives:
                size = (f"{each.ranks:,}", readable_size(each.nbytes), f"{each.calls:,}")
                times = readable_time(each.seconds), readable_time(each.exposed)
                yield _row([escape(each.name), *size, *times], numbers=range(1, 6))
            yield "</table>"
        if self.others:
            yield "<h2>Next best</h2><table>"
            for point in self.others:
                texts = [readable_time(point.seconds), readable_size(point.memory_bytes), escape(point.name)]
                yield _row(texts, numbers=(0, 1))
            yield "</table>"
        if self.refused:
            yield "<h2>One step away</h2><table>"
            yield from (_row([escape(each.change), escape(each.why)]) for each in self.refused)
            yield "</table>"


def point_of(priced: PricedPlan) -> TradePoint:
    """A priced plan as a point."""
    return TradePoint(str(priced.plan), priced.time.total, priced.memory.total, priced.plan.recompute)


def _row(texts: Sequence[str], *, numbers: Sequence[int] = (), cell: str = "td") -> str:
    cells = "".join(
        f"<{cell}{' class=n' if at in numbers else ''}>{text}</{cell}>" for at, text in enumerate(texts)
    )
    return f"<tr>{cells}</tr>"
