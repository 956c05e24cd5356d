"""The space-time diagram as SVG: ranks side by side, rounds downwards, an arrow for every message.

Between two rows a rank sends at most one message and receives at most one. So every column has room for the
label of its message, each arrow ends on a column of its own, and no texts overlap.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from unisono.commands.drawing.colours import COLOURS, styled
from unisono.commands.drawing.trace import PlanTrace, RoundMessage, TraceRound, numbers
from unisono.plans import CONTRACTS, Chunk
from unisono.plans.proof import SymbolicValue

__all__ = ["MOST_RANKS", "check", "svg"]

MOST_RANKS = 16
MOST_CHUNKS = 32
MOST_ROUNDS = 100

MARGIN = 20
GUTTER = 84
"""Left of the ranks: the rounds and their times."""
ROW_HEIGHT = 22
SCRATCH = 17
BAND = 74
"""Between two rows of cells."""
PILL = 17
NARROWEST = 390
GAP = 20
LETTER = 6.1
"""The largest width of a letter of 11 px."""

SHAPES = """
text{font:11px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
.title{font-size:18px;font-weight:650}.mid,.m10,.m11{text-anchor:middle}.m10{font-size:10px}
.name{font-weight:600;font-size:12px}.rail{stroke-width:2}.scratch{stroke-dasharray:2 2}
.new{fill:none;stroke-width:1.8}.part{fill-opacity:.5}.way{fill:none;stroke-width:2}.pill{stroke-width:1.5}
"""

COLOURED = """
text{fill:$ink}.quiet{fill:$quiet}.paper,.cell{fill:$paper}.host{fill:$panel}.rail{stroke:$rail}
.cell{stroke:$line}.new{stroke:$ink}.pill{stroke:$paper}.fs{fill:$quiet}.ts{fill:$paper}.ls{stroke:$quiet}
""" + "".join(f".f{n}{{fill:$f{n}}}.t{n}{{fill:$t{n}}}.l{n}{{stroke:$f{n}}}" for n in range(COLOURS))
"""For each chunk: its fill (f0), text on it (t0), a line (l0); s: several chunks."""


class _ChunkRow(NamedTuple):
    """A row of cells: the chunks of one space of one rank."""

    space: str
    cells: int
    y: float
    height: float


def svg(picture: PlanTrace) -> str:
    """The diagram as an SVG document.

    Raises:
        ValueError: there are too many ranks, chunks or rounds for a readable picture.
    """
    plan = picture.plan
    check(plan.size, MOST_RANKS, "ranks")
    check(max(plan.chunks(space) for space in ("in", "out", "tmp")), MOST_CHUNKS, "chunks")
    check(len(picture.rounds), MOST_ROUNDS, "rounds")
    return _Diagram(picture).document()


def check(number: int, most: int, what: str) -> None:
    """Refuse a picture that would be unreadable.

    Raises:
        ValueError: there are more than `most`.
    """
    if number > most:
        raise ValueError(f"{number} {what}: a picture shows {most} at most; --json has no limit")


class _Diagram:
    """The layout of one picture, and its SVG text."""

    def __init__(self, picture: PlanTrace) -> None:
        self.picture = picture
        self.plan = picture.plan
        self.held = picture.held()
        self.contract = CONTRACTS[self.plan.collective]
        self.title = f"{self.plan.collective} · {self.plan.algorithm}"
        self.ranks = _count(self.plan.size, "rank")
        if self.contract.rooted:
            self.ranks += f", root {self.plan.root}"
        self.outs = max(1, self.plan.chunks("out"))
        self.tmps = self.plan.chunks("tmp")
        start = 1 if self.contract.in_place else self.plan.chunks("in")
        cells = max(start, self.outs, self.tmps)
        least = 60 if self.plan.size <= 8 else 78  # room for more ranks' numbers
        self.row_width = max(least, cells * {2: 34, 3: 28, 4: 25}.get(cells, 17 if cells <= 8 else 14))
        self.pitch = self.row_width + GAP
        self.row_height = ROW_HEIGHT + (SCRATCH + 3 if self.tmps else 0)
        wide = GUTTER + self.plan.size * self.pitch
        titled = 1.8 * LETTER * len(self.title) + 1.2 * LETTER * len(self.ranks) + 8
        self.width = max(wide, titled, NARROWEST) + 2 * MARGIN
        self.left = GUTTER + MARGIN  # of the first column
        self.head = self._head()
        self.top = MARGIN + 34 + 16 * len(self.head) + 46
        self.bottom = self.row_y(len(picture.rounds)) + self.row_height

    # ---- places --------------------------------------------------------------------------------------

    def row_y(self, row: int) -> float:
        """The top of the cells after round `row`; the start has no scratch memory."""
        return self.top if row == 0 else self.top + ROW_HEIGHT + row * BAND + (row - 1) * self.row_height

    def x(self, rank: int) -> float:
        """The centre of a column."""
        return self.left + (rank + 0.5) * self.pitch

    def strips(self, rank: int, row: int) -> list[_ChunkRow]:
        """The rows of cells of a rank in a row."""
        y, found = self.row_y(row), []
        if row == 0:
            space = "out" if self.contract.in_place else "in"
            count = self.outs if space == "out" else max(1, self.plan.chunks("in"))
            return (
                [_ChunkRow(space, count, y, ROW_HEIGHT)] if self.contract.gives(rank, self.plan.root) else []
            )
        if self.contract.expected(rank, 0, self.plan.size, self.plan.root) is not None:
            found.append(_ChunkRow("out", self.outs, y, ROW_HEIGHT))
        if any(chunk.space == "tmp" for chunk in self.held[-1][rank]):
            place = (y + ROW_HEIGHT + 3, SCRATCH) if found else (y, ROW_HEIGHT)
            found.append(_ChunkRow("tmp", self.tmps, *place))
        return found

    # ---- the document --------------------------------------------------------------------------------

    def document(self) -> str:
        """The whole text."""
        lines = _legend(self.picture, int((self.width - 2 * MARGIN) / LETTER), bool(self.tmps))
        height = self.bottom + 30 + 15 * len(lines) + MARGIN - 6
        rounds = self.picture.rounds
        parts = [
            *self._columns(),
            *self._round(0, None),
            *(text for row, one in enumerate(rounds, 1) for text in self._round(row, one)),
            *(
                f'<text class="quiet" x="{MARGIN}" y="{self.bottom + 32 + 15 * n:g}">{escape(line)}</text>'
                for n, line in enumerate(lines)
            ),
        ]
        style = (SHAPES + styled(COLOURED)).replace("\n", "")
        size = f'width="{self.width:g}" height="{height:g}" viewBox="0 0 {self.width:g} {height:g}"'
        title = escape(f"{self.plan}")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">'
            f"<title>{title}</title><style>{style}</style>"
            f'<rect class="paper" width="100%" height="100%" rx="8"/>\n' + "\n".join(parts) + "\n</svg>\n"
        )

    def _head(self) -> list[str]:
        cost = self.picture.cost
        lines = [
            f"{_count(cost.rounds, 'round')}; a rank sends at most {_count(cost.messages, 'message')}"
            + (f", {_part(cost.sent)}" if self.contract.counts else ""),
            f"time {cost.formula}" if cost.formula != "0" else "no message, no time",
        ]
        if cost.crossing:
            lines[0] += f"; a host sends at most {_part(cost.crossing)} to others"
        if cost.rounds:
            lines.append(_figures(self.picture))
        letters = int((self.width - 2 * MARGIN) / LETTER)
        return [part for line in lines for part in textwrap.wrap(line, letters)]

    def _columns(self) -> Iterator[str]:
        plan = self.plan
        yield (
            f'<text class="title" x="{MARGIN}" y="{MARGIN + 16}">{escape(self.title)}'
            f'<tspan class="quiet" font-size="13" font-weight="400" dx="8">{self.ranks}</tspan></text>'
        )
        for n, line in enumerate(self.head):
            yield f'<text class="quiet" x="{MARGIN}" y="{MARGIN + 38 + 16 * n}">{escape(line)}</text>'
        top = self.top - 46
        for first, end, host in self._hosts():
            left, width = self.left + first * self.pitch + 3, (end - first) * self.pitch - 6
            box = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{self.bottom - top + 8:g}"'
            yield f'<rect class="host" {box} rx="8"/>'
            if plan.hosts:
                yield f'<text class="quiet mid" x="{left + width / 2:g}" y="{top + 15:g}">host {host}</text>'
        for rank in range(plan.size):
            x = self.x(rank)
            yield f'<path class="rail" d="M{x:g} {self.top:g}V{self.bottom:g}"/>'
            yield f'<text class="name mid" x="{x:g}" y="{self.top - 10:g}">rank {rank}</text>'

    def _hosts(self) -> Iterator[tuple[int, int, int]]:
        """(first rank, one beyond the last, host) of neighbours on one host."""
        hosts = self.plan.hosts or (0,) * self.plan.size
        first = 0
        for rank in range(1, len(hosts) + 1):
            if rank == len(hosts) or hosts[rank] != hosts[first]:
                yield first, rank, hosts[first]
                first = rank

    def _round(self, row: int, one: TraceRound | None) -> Iterator[str]:
        """The messages of a round, and what ranks hold after it. 0 is the start."""
        y = self.row_y(row)
        yield f'<g class="round" data-round="{row}">'
        name = "start" if one is None else f"round {row}"
        yield f'<text class="name" x="{self.left - GUTTER:g}" y="{y + 15:g}">{name}</text>'
        if one is not None and self.picture.cost.rounds:
            when = _seconds(one.end_s)
            yield f'<text class="quiet" x="{self.left - GUTTER:g}" y="{y + 29:g}">{when}</text>'
        for message in one.messages if one else ():
            yield from self._message(message, row)
        new = {(change.rank, change.chunk) for change in one.changes} if one else set()
        for rank in range(self.plan.size):
            for strip in self.strips(rank, row):
                yield from self._strip(rank, row, strip, new)
        yield "</g>"

    def _strip(self, rank: int, row: int, strip: _ChunkRow, new: set[tuple[int, Chunk]]) -> Iterator[str]:
        width = self.row_width / strip.cells
        left = self.x(rank) - self.row_width / 2
        size = 10 if width < 15 or strip.height < ROW_HEIGHT else 11
        kind = "cell scratch" if strip.space == "tmp" else "cell"
        inner = "".join(f"M{left + n * width:g} {strip.y:g}v{strip.height:g}" for n in range(1, strip.cells))
        yield (
            f'<path class="{kind}" '
            f'd="M{left:g} {strip.y:g}h{self.row_width:g}v{strip.height:g}h{-self.row_width:g}z{inner}"/>'
        )
        frames = []
        for index in range(strip.cells):
            x, chunk = left + index * width, Chunk(strip.space, index)
            value = self.held[row][rank].get(chunk)
            share = 0.0 if value is None else self.picture.complete(value)
            if value is None or not share:
                continue
            colour = self.picture.colour(value) % COLOURS
            part, ink = ("", f" t{colour}") if share == 1 else (" part", "")
            level = max(strip.height * share - 1, 1)
            yield (
                f'<rect class="f{colour}{part}" x="{x + 0.5:g}" y="{strip.y + strip.height - level - 0.5:g}" '
                f'width="{width - 1:g}" height="{level:g}"/>'
            )
            if (rank, chunk) in new:
                frames.append(f"M{x:g} {strip.y:g}h{width:g}v{strip.height:g}h{-width:g}z")
            text = self._label(value, strip)
            if len(text) * LETTER * size / 11 <= width:
                place = f'x="{x + width / 2:g}" y="{strip.y + strip.height / 2 + 4:g}"'
                yield f'<text class="m{size}{ink}" {place}>{escape(text)}</text>'
        if frames:  # above the cells beside them
            yield f'<path class="new" d="{"".join(frames)}"/>'

    def _label(self, value: SymbolicValue, strip: _ChunkRow) -> str:
        if strip.cells == 1 and (self.contract.reduces or not self.contract.in_place):
            return self.picture.label(value)
        if self.plan.collective == "all_to_all" and strip.space == "in":
            return str(value.block)
        return str(self.picture.colour(value))

    # ---- messages ------------------------------------------------------------------------------------

    def _message(self, message: RoundMessage, row: int) -> Iterator[str]:
        above = self.row_y(row - 1) + (ROW_HEIGHT if row == 1 else self.row_height) + 5
        xs, xr = self.x(message.sender), self.x(message.receiver)
        top, bottom = above + PILL - 3, self.row_y(row) - 7
        middle = (top + bottom) / 2
        colours = {self.picture.colour(value) % COLOURS for _, value in message.parts}
        colour = str(colours.pop()) if len(colours) == 1 else "s"  # several chunks
        text = message_label(self.picture, message)
        if len(text) * LETTER + 6 > self.pitch - 4:
            text = _count(len(message.parts), "chunk")
        width = min(max(len(text) * LETTER + 12, 22), self.pitch - 4)
        yield f"<g><title>{escape(self.picture.sentence(message))}</title>"
        yield (
            f'<path class="way l{colour}" '
            f'd="M{xs:g} {top:g}C{xs:g} {middle:g} {xr:g} {middle:g} {xr:g} {bottom:g}"/>'
        )
        yield f'<path class="f{colour}" d="M{xr - 4.5:g} {bottom - 2:g}h9l-4.5 8z"/>'
        yield (
            f'<rect class="pill f{colour}" x="{xs - width / 2:g}" y="{above:g}" '
            f'width="{width:g}" height="{PILL}" rx="{PILL / 2:g}"/>'
        )
        place = f'x="{xs:g}" y="{above + 12.5:g}"'
        yield f'<text class="m11 t{colour}" {place}>{escape(text)}</text></g>'


def message_label(picture: PlanTrace, message: RoundMessage) -> str:
    """The label of an arrow: the chunks that it carries."""
    if len(message.parts) == 1:
        return picture.label(message.parts[0][1])
    return numbers(tuple(dict.fromkeys(picture.colour(value) for _, value in message.parts)))


def _legend(picture: PlanTrace, letters: int, scratch: bool) -> list[str]:
    contract = CONTRACTS[picture.plan.collective]
    lines = ["A row is what the ranks hold after a round; a bold frame: written in this round."]
    if contract.reduces:
        lines.append("The fill is the share of the ranks whose contributions are in; Σ: combined.")
    lines.append("A label on an arrow names what is sent.")
    if scratch:
        lines.append("Dashed: scratch memory.")
    return textwrap.wrap(" ".join(lines), letters)


def _figures(picture: PlanTrace) -> str:
    """The figures of the cost model, and the time that follows from them."""
    cost = picture.cost
    where = "measured here" if cost.calibrated else "an ordinary machine"
    a = f"a = {_seconds(cost.a_s)}"
    if not CONTRACTS[picture.plan.collective].counts:
        return f"{_seconds(cost.seconds)} at {a} ({where})"
    speed = f"1/b = {1e-9 / cost.b_s:.3g} GB/s"
    if cost.crossing:
        a += f" ({_seconds(cost.far_a_s)} between hosts)"
        speed += f" ({1e-9 / cost.far_b_s:.3g})"
    figures = f"{a}, {speed}, 1/g = {1e-9 / cost.g_s:.3g} GB/s"
    return f"L = {_bytes(cost.nbytes)}: {_seconds(cost.seconds)} at {figures} ({where})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _part(part: str) -> str:
    if part == "1":
        return "the buffer once"
    return f"{part} of the buffer" if "/" in part else f"the buffer {part} times"


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _bytes(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} B"
