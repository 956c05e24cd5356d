"""A network as SVG: its nodes on rings around the middle, those that most routes cross nearest to it."""

from __future__ import annotations

import math
from collections import deque
from html import escape

from unisono.networks import Network
from unisono.networks.quantities import written_rate, written_time

__all__ = ["svg"]

MOST_LINKS = 4000
SIZE = 900
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#B5A400", "#8A8A8A")

STYLE = (
    "<style>text{font:10px system-ui,sans-serif;fill:#1b1f24;text-anchor:middle}.t{font-size:16px;"
    "font-weight:600;text-anchor:start}.n{fill:#f3f5f8;stroke:#5b6570}line{stroke-opacity:.7}"
    "@media(prefers-color-scheme:dark){text{fill:#e8ebef}.n{fill:#1d2229;stroke:#9aa5b1}}</style>"
)


def svg(network: Network) -> str:
    """The drawing.

    Raises:
        ValueError: it has too many links for one.
    """
    if len(network.links) > MOST_LINKS:
        raise ValueError(
            f"{network.name} has {len(network.links)} links, at most {MOST_LINKS} can be drawn; "
            "draw a smaller one"
        )
    edges = {tuple(sorted(link.ends)): link for link in reversed(network.links[:])}
    places = _places(sorted({node for ends in edges for node in ends}), list(edges))
    rates = sorted({link.bytes_per_s for link in edges.values()}, reverse=True)
    title = f"{network.name}: {network.size} ranks, {len(network.links)} links"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE + 40}" role="img">',
        f"<title>{escape(network.name)}</title>",
        STYLE,
        f'<text class="t" x="12" y="22">{escape(title)}</text>',
    ]
    for at, rate in enumerate(rates[: len(COLOURS)]):
        lines.append(f'<rect x="{12 + 110 * at}" y="30" width="10" height="10" fill="{COLOURS[at]}"/>')
        lines.append(
            f'<text x="{26 + 110 * at}" y="39" style="text-anchor:start">{written_rate(rate)}</text>'
        )
    for (one, other), link in edges.items():
        (x1, y1), (x2, y2) = places[one], places[other]
        colour = COLOURS[min(rates.index(link.bytes_per_s), len(COLOURS) - 1)]
        width = 1 + 2 * (link.bytes_per_s / rates[0]) ** 0.5
        lines.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
            f'stroke-width="{width:.1f}"><title>{escape(link.name)}: {written_time(link.latency_s)}, '
            f"{written_rate(link.bytes_per_s)}</title></line>"
        )
    labelled = len(places) <= 120
    for node, (x, y) in places.items():
        lines.append(
            f'<circle class="n" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(node)}</title></circle>'
        )
        if labelled:
            lines.append(f'<text x="{x:.1f}" y="{y - 8:.1f}">{escape(node)}</text>')
    return "\n".join([*lines, "</svg>"])


def _places(nodes: list[str], edges: list[tuple[str, ...]]) -> dict[str, tuple[float, float]]:
    """Rings by the distance from the node with the most neighbours; a node is near its inner neighbour."""
    neighbours: dict[str, set[str]] = {node: set() for node in nodes}
    for one, other in edges:
        neighbours[one].add(other)
        neighbours[other].add(one)
    uniform = len({len(each) for each in neighbours.values()}) == 1
    middle = SIZE / 2
    if uniform:  # a ring, a torus, a full mesh
        return _ring(nodes, middle, SIZE * 0.42, [2 * math.pi * at / len(nodes) for at in range(len(nodes))])
    start = max(nodes, key=lambda node: len(neighbours[node]))
    levels: dict[str, int] = {start: 0}
    waiting = deque([start])
    while waiting:
        node = waiting.popleft()
        for other in sorted(neighbours[node]):
            if other not in levels:
                levels[other] = levels[node] + 1
                waiting.append(other)
    for node in nodes:
        levels.setdefault(node, 1)
    deepest = max(levels.values()) or 1
    places: dict[str, tuple[float, float]] = {}
    angles: dict[str, float] = {}
    for level in range(deepest + 1):
        ring = [node for node in nodes if levels[node] == level]
        inner = {node: [angles[each] for each in neighbours[node] if each in angles] for node in ring}
        ring.sort(key=lambda node: (inner[node][0] if inner[node] else 0.0, node))
        turned = [2 * math.pi * at / len(ring) for at in range(len(ring))]
        angles.update(zip(ring, turned, strict=True))
        places.update(_ring(ring, middle, SIZE * 0.45 * level / deepest, turned))
    return places


def _ring(
    nodes: list[str], middle: float, radius: float, angles: list[float]
) -> dict[str, tuple[float, float]]:
    return {
        node: (middle + radius * math.sin(angle), 40 + middle - radius * math.cos(angle))
        for node, angle in zip(nodes, angles, strict=True)
    }
