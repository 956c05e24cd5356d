"""What ranks did, as a trace for Perfetto (ui.perfetto.dev, chrome://tracing) or as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from unisono.networks.quantities import written_time
from unisono.simulation import LinkUse, Result, Span

__all__ = ["perfetto", "svg"]

MOST_RANKS = 32
MOST_LINKS = 24
MOST_SPANS = 20_000

LEFT, WIDTH, ROW, TOP = 190, 900, 16, 64
COLOURS = {
    "send": "#56B4E9",
    "recv": "#0072B2",
    "reduce": "#E69F00",
    "copy": "#B5A400",
    "compute": "#009E73",
}
OTHER = "#8A8A8A"
BUSY, LIMITING = "#56B4E9", "#D55E00"
STYLE = (
    "<style>text{font:11px system-ui,sans-serif;fill:#1b1f24}.t{font-size:16px;font-weight:600}"
    ".r{fill:#f3f5f8}@media(prefers-color-scheme:dark){text{fill:#e8ebef}.r{fill:#1d2229}}</style>"
)


def perfetto(result: Result) -> dict[str, Any]:
    """Events of the Chrome trace format: a process for each rank, a thread for each stream, microseconds."""
    names: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in result.spans})
    ]
    events = [
        {
            "ph": "X",
            "name": span.kind,
            "pid": span.rank,
            "tid": span.stream,
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "args": {"step": span.step},
        }
        for span in result.spans
    ]
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ns",
        "otherData": {"name": result.name, "network": result.network, "limit": str(result.limit)},
    }


def svg(result: Result) -> str:
    """Ranks over time, and below them the links by how long they were the slowest of a message."""
    ranks = sorted({span.rank for span in result.spans})[:MOST_RANKS]
    links = [use for use in result.links if use.busy_s > 0][:MOST_LINKS]
    height = TOP + ROW * len(ranks) + 50 + ROW * len(links) + 40
    seconds = written_time(float(f"{result.seconds:.4g}"))
    title = f"{result.name} on {result.network}, {result.size} ranks: {seconds}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 120} {height}" role="img">',
        f"<title>{escape(str(result))}</title>",
        STYLE,
        f'<text class="t" x="12" y="24">{escape(title)}</text>',
        *_legend(),
        *_ranks(result, ranks),
        *_links(result, links, TOP + ROW * len(ranks) + 44),
        "</svg>",
    ]
    return "\n".join(lines)


def _legend() -> Iterator[str]:
    at = 12
    for kind, colour in (*COLOURS.items(), ("link busy", BUSY), ("link limits", LIMITING)):
        yield f'<rect x="{at}" y="36" width="11" height="11" fill="{colour}"/>'
        yield f'<text x="{at + 15}" y="46">{kind}</text>'
        at += 34 + 7 * len(kind)


def _ranks(result: Result, ranks: list[int]) -> Iterator[str]:
    scale = WIDTH / result.seconds if result.seconds else 0.0
    rows = {rank: TOP + ROW * at for at, rank in enumerate(ranks)}
    for rank, y in rows.items():
        yield f'<text x="12" y="{y + 11}">rank {rank}</text>'
        yield f'<rect class="r" x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW - 3}"/>'
    drawn: list[Span] = [span for span in result.spans if span.rank in rows][:MOST_SPANS]
    for span in drawn:
        x, width = LEFT + span.start * scale, max(0.3, (span.end - span.start) * scale)
        yield (
            f'<rect x="{x:.2f}" y="{rows[span.rank]}" width="{width:.2f}" height="{ROW - 3}" '
            f'fill="{COLOURS.get(span.kind, OTHER)}"><title>{span.kind}, step {span.step}: '
            f"{written_time(span.start)} to {written_time(span.end)}</title></rect>"
        )


def _links(result: Result, links: list[LinkUse], top: int) -> Iterator[str]:
    scale = WIDTH / result.seconds if result.seconds else 0.0
    yield f'<text x="12" y="{top - 6}">links, the longest limiting first</text>'
    for at, use in enumerate(links):
        y = top + ROW * at
        yield f'<text x="12" y="{y + 11}">{escape(use.name[-28:])}</text>'
        yield f'<rect class="r" x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW - 3}"/>'
        for seconds, colour, inset in ((use.busy_s, BUSY, 0), (use.limiting_s, LIMITING, 4)):
            yield (
                f'<rect x="{LEFT}" y="{y + inset}" width="{min(seconds * scale, WIDTH):.2f}" '
                f'height="{ROW - 3 - 2 * inset}" fill="{colour}"/>'
            )
        share = 100 * use.busy_s / result.seconds if result.seconds else 0
        yield f'<text x="{LEFT + WIDTH + 6}" y="{y + 11}">{share:.0f} % busy</text>'
