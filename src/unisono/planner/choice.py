"""The answer of a search for plans: the chosen one, others, and why not those one step away.

`PlanChoice` is that of a model's numbers, and `unisono.parallel.ModelChoice` that of a recorded model.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple

from unisono.networks.quantities import readable_size, readable_time, signed_time
from unisono.planner.choice_page import STYLE, PricedCollective, TradePoint, columns, named, row, trade_svg

CAUSE_NAMES = {
    "recompute": "recomputation",
    "tensor": "tensor collectives",
    "context": "context exchange",
    "experts": "rows of experts",
    "messages": "pipeline messages",
    "data": "data collectives",
    "swap": "swapping",
    "update": "optimizer",
}
"""As people read the causes of both planners' steps."""

MOST_COLLECTIVES, MOST_REFUSED, WIDEST_CHANGE = 5, 8, 40
"""Of the tables as text."""

ROUNDING = 1e-9
"""Seconds; plans that differ by less are as fast."""


class RefusedPlan(NamedTuple):
    """A plan one step away from the chosen one."""

    change: str  # the fields that differ, such as "zero=1"
    problem: str  # why it cannot be run; "" if it can. The bytes and seconds that are known are beside it
    excess_bytes: int  # memory above the limit; 0: it fits, or its seconds refuse it already
    # Seconds more than the chosen plan's, below 0 where it is faster and does not fit; None: not known.
    excess_s: float | None
    # What grows most, with its seconds where the model is numbers: of the step, or of the memory.
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
        return str(max(self.chosen.seconds.items(), key=lambda item: item[1])[0])

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
        points = self.points(plans)
        title = f"{len(points):,} plans: seconds of a step over memory of a rank"
        picture = "<h2>Time over memory</h2>", trade_svg(title, points, self.limit_bytes)
        return "\n".join([*self._head(), *picture, *self._parts(), *self._tables(), "</html>", ""])

    def points(self, plans: Iterable[Any] = ()) -> list[TradePoint]:
        """This plan, the next best and `plans` in the picture."""
        return [
            TradePoint(str(each.plan), each.time.total, each.memory_bytes, str(each.plan.recompute))
            for each in (self.chosen, *self.next_best, *plans)
        ]

    @property
    def _shown(self) -> tuple[dict[str, float], dict[str, float]]:
        """The parts of the step and of the memory, as people call them."""
        names, seconds = self.NAMES, self.chosen.seconds.items()
        time = {names.get(name, name): value for name, value in seconds if value or name in self.ALWAYS}
        return time, {names.get(name, name): value for name, value in self.chosen.parts.items()}

    def __str__(self) -> str:
        shown = (self.plan, *self._about(), self._memory(), *self._beside())
        lines = [self._title(), *(f"  {line}" for line in shown), "", *self._lines()]
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

    # ---- how it is shown ----

    def _lines(self) -> Iterator[str]:
        """Its tables as text."""
        time, memory = self._shown
        total, width = sum(time.values()), max(map(len, memory)) + 2
        left = [
            f"{name:<19}{readable_time(value):>9}{100 * value / total:>6.1f} %"
            for name, value in time.items()
        ]
        right = [f"{name:<{width}}{readable_size(value):>12}" for name, value in memory.items()]
        right.append(f"limit: {self.NAMES.get(self.limit, self.limit)}")
        for one, other in zip_longest(left, right, fillvalue=""):
            yield f"  {one:<36}    {other}".rstrip()
        if self.collectives:
            yield f"  {'collectives of a rank':<26}{columns(self._heads)}"
        yield from (
            f"    {named(each):<24}{columns(each.cells)}" for each in self.collectives[:MOST_COLLECTIVES]
        )
        if self.next_best:
            yield "  next best"
        for each in self.next_best:
            seconds, size = readable_time(each.time.total), readable_size(each.memory_bytes)
            yield f"    {seconds:>9}{size:>12}  {self._change(each.plan)}"
        if self.refused:
            yield "  one step away"
        shown = self.refused[:MOST_REFUSED]
        widest = min(WIDEST_CHANGE, max((len(each.change) for each in shown), default=0))
        yield from (f"    {each.change:<{widest}}  {self._refusal(each)}" for each in shown)

    @property
    def _heads(self) -> tuple[str, ...]:
        """Of the columns of collectives."""
        known = any(each.exposed is not None for each in self.collectives)
        return ("ranks", "bytes", "calls", "time", *["not hidden"] * known)

    def _head(self) -> Iterator[str]:
        state = "fits" if self.fits else '<span class="bad">DOES NOT FIT</span>'
        held, limit, title = readable_size(self.memory_bytes), readable_size(self.limit_bytes), self._title()
        used = f"{held} of {limit} on the fullest rank"
        yield '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">'
        yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
        yield f"<title>{escape(title)}</title>\n<style>{STYLE}</style>"
        yield f"<h1>{escape(title)}</h1>\n<p><code>{escape(str(self.plan))}</code></p>"
        yield f"<p>{readable_time(self.seconds)} a step. {used}: {state}.</p>"
        yield from (f"<p>{escape(line)}</p>" for line in (*self._about(), *self._beside()))

    def _parts(self) -> Iterator[str]:
        yield '<div class="two">'
        time, memory = self._shown
        for title, parts, shown in (("A step", time, readable_time), ("Memory", memory, readable_size)):
            total = sum(parts.values()) or 1.0
            yield f"<div><h2>{title}</h2><table>"
            for name, value in ((name, value) for name, value in parts.items() if value):
                bar = f'<div class="bar" style="width:{100 * max(0.0, value) / total:.1f}%"></div>'
                yield row([escape(name), shown(value), f"{value / total:.1%}", bar], numbers=(1, 2))
            yield "</table></div>"
        yield "</div>"

    def _tables(self) -> Iterator[str]:
        if self.collectives:
            yield "<h2>Collectives of a rank</h2><table>"
            yield row(("collective", *self._heads), numbers=range(1, 6), cell="th")
            for each in self.collectives:
                yield row([escape(named(each)), *each.cells], numbers=range(1, 6))
            yield "</table>"
        if self.next_best:
            yield "<h2>Next best</h2><table>"
            for one in self.next_best:
                seconds, size = readable_time(one.time.total), readable_size(one.memory_bytes)
                texts = [seconds, size, escape(str(one.plan))]
                yield row(texts, numbers=(0, 1))
            yield "</table>"
        if self.refused:
            yield "<h2>One step away</h2><table>"
            yield from (row([escape(each.change), escape(self._refusal(each))]) for each in self.refused)
            yield "</table>"

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
