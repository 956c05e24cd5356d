"""Draws the figures of README and docs from benchmarks/results, as plain SVG: `make figures`.

A figure follows the reader's preference for light or dark. Equal results give equal bytes: a test can
compare the files with the results. Needs Python only. With --tables it also prints the tables of
docs/performance.md.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "docs" / "figures"

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 66, 20, 52, 50
UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
TIMES = ((1e6, "s"), (1e3, "ms"), (1, "us"))


class Look(NamedTuple):
    """A library in the figure: name, colours on a light and on a dark page, dashes, marker."""

    name: str
    light: str
    dark: str
    dashes: str
    marker: str


LOOKS = {
    "intelmpi": Look("Intel MPI", "#7a7f87", "#9aa1ab", "2 4", "diamond"),
    "mpich": Look("MPICH", "#b0592a", "#e0935f", "9 4", "square"),
    "openmpi": Look("Open MPI", "#2f7d4f", "#63b98a", "6 3 2 3", "triangle"),
    "gloo": Look("Gloo", "#b0592a", "#e0935f", "9 4", "square"),
    "unisono": Look("Unisono", "#1f4fd8", "#7ea2ff", "", "circle"),
}
CORNERS = {
    "square": [(-4.2, -4.2), (4.2, -4.2), (4.2, 4.2), (-4.2, 4.2)],
    "diamond": [(0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)],
    "triangle": [(0, -5), (5, 4), (-5, 4)],
}
PAPER = {"light": ("#ffffff", "#1f2328", "#d0d7de"), "dark": ("#0d1117", "#e6edf3", "#30363d")}
"""Background, text and grid."""


class Figure(NamedTuple):
    """One figure: its results, the rows that it shows, and its title."""

    file: str
    results: str
    operation: str
    ranks: int
    title: str


FIGURES = [
    Figure("all_reduce-2", "2026-11-21", "all_reduce", 2, "all_reduce of NumPy arrays, 2 ranks on one host"),
    Figure("all_reduce-4", "2026-11-21", "all_reduce", 4, "all_reduce of NumPy arrays, 4 ranks on 2 cores"),
    Figure("torch-2", "2026-11-22-torch", "all_reduce", 2, "all_reduce through torch.distributed, 2 ranks"),
]

Lines = dict[str, list[tuple[int, float]]]


def read(figure: Figure) -> Lines:
    """Return {library: [(bytes, microseconds), ...]}, sorted, for the libraries with a `Look`."""
    lines: Lines = {}
    with (RESULTS / f"{figure.results}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["operation"], int(row["ranks"])) == (figure.operation, figure.ranks):
                lines.setdefault(row["library"], []).append((int(row["nbytes"]), float(row["p50_us"])))
    return {library: sorted(lines[library]) for library in LOOKS if library in lines}


def amount(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Return a number with the largest unit that it reaches: 65536 bytes are "64 KiB"."""
    factor, unit = next((pair for pair in units if value >= pair[0]), units[-1])
    return f"{value / factor:.3g} {unit}"


class Axis(NamedTuple):
    """A logarithmic axis from `low` to `high`, at the pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)


def axes(lines: Lines) -> tuple[Axis, Axis]:
    """Return the axes for all points: sizes with a margin, times in whole decades."""
    sizes = [size for points in lines.values() for size, _ in points]
    times = [time for points in lines.values() for _, time in points]
    below, above = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    across = Axis(min(sizes) / 1.6, max(sizes) * 1.6, LEFT, WIDTH - RIGHT)
    return across, Axis(10.0**below, 10.0**above, HEIGHT - BOTTOM, TOP)


def style() -> str:
    """Return the colours as CSS: a class for each library, and three for the paper."""
    rules = []
    for theme, (paper, ink, rule) in PAPER.items():
        colours = [f".paper{{fill:{paper}}} text{{fill:{ink}}} .grid{{stroke:{rule}}}"]
        for library, look in LOOKS.items():
            colour = getattr(look, theme)
            colours.append(f".{library}{{stroke:{colour}}} .{library}-point{{fill:{colour}}}")
        rules.append(" ".join(colours))
    return f"<style>{rules[0]} @media (prefers-color-scheme: dark) {{{rules[1]}}}</style>"


def marker(library: str, x: float, y: float) -> str:
    """Return a point: the shapes differ, so that the figure can be read without its colours."""
    corners = CORNERS.get(LOOKS[library].marker)
    if corners is None:
        return f'<circle class="{library}-point" cx="{x}" cy="{y}" r="4.5"/>'
    places = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="{library}-point" points="{places}"/>'


def grid(lines: Lines, across: Axis, up: Axis) -> list[str]:
    """Return the lines of the grid with their labels."""
    parts = []
    for size in sorted({size for points in lines.values() for size, _ in points}):
        x = across.place(size)
        parts.append(f'<path d="M{x} {TOP}V{HEIGHT - BOTTOM}" class="grid"/>')
        parts.append(label(x, HEIGHT - BOTTOM + 18, amount(size, UNITS), "middle"))
    decade = up.low
    while decade <= up.high * 1.001:
        y = up.place(decade)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" class="grid"/>')
        parts.append(label(LEFT - 8, y + 4, amount(decade * 1.0001, TIMES), "end"))
        decade *= 10
    return [*parts, label(WIDTH - RIGHT, HEIGHT - 10, "bytes per rank, logarithmic", "end")]


def label(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    """Return a text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{more}>{text}</text>'


def stroke(library: str, path: str) -> str:
    """Return a line in a library's colour and dashes."""
    dashes = LOOKS[library].dashes
    width = 3 if library == "unisono" else 1.8
    more = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path class="{library}" d="{path}" fill="none" stroke-width="{width}"{more}/>'


def curve(library: str, points: list[tuple[int, float]], across: Axis, up: Axis) -> str:
    """Return the line of one library with its points."""
    places = [(across.place(size), up.place(time)) for size, time in points]
    path = "M" + "L".join(f"{x} {y}" for x, y in places)
    return stroke(library, path) + "".join(marker(library, x, y) for x, y in places)


def draw(figure: Figure) -> str:
    """Return a figure as SVG."""
    lines = read(figure)
    across, up = axes(lines)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"',
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{figure.title}: time of a call over its size</title>",
        style(),
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        label(LEFT, 24, figure.title, "start", ' font-size="16" font-weight="600"'),
        label(LEFT, 42, "time of a call, logarithmic; lower is faster", "start"),
    ]
    legend = []
    for row, library in enumerate(reversed(lines)):
        y = TOP + 20 + 20 * row
        legend.append(stroke(library, f"M{LEFT + 16} {y}H{LEFT + 52}"))
        legend.append(marker(library, LEFT + 34, y))
        legend.append(label(LEFT + 62, y + 4, LOOKS[library].name, "start"))
    curves = [curve(library, points, across, up) for library, points in lines.items()]
    height = 20 * len(lines) + 8
    box = f'<rect class="paper" x="{LEFT + 8}" y="{TOP + 6}" width="136" height="{height}"/>'
    return "\n".join([*head, *grid(lines, across, up), *curves, box, *legend, "</svg>", ""])


MPI = ("openmpi", "mpich", "intelmpi")
SHOWN = (256, 16 << 10, 1 << 20, 16 << 20, 64 << 20)
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "send_recv")


def spoken(microseconds: float) -> str:
    """Return a time with two digits, or three from 100 on: 3.6 us, 179 us, 15 ms."""
    value, unit = (microseconds / 1e3, "ms") if microseconds >= 1e3 else (microseconds, "us")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


def table(results: str, ranks: int) -> list[str]:
    """Return rows of Markdown: each operation's time at some sizes, and the fastest MPI library's."""
    with (RESULTS / f"{results}.csv").open(newline="") as file:
        times = {
            (row["operation"], int(row["nbytes"]), row["library"]): float(row["p50_us"])
            for row in csv.DictReader(file)
            if int(row["ranks"]) == ranks and row["p50_us"]
        }
    rows = [["", "smallest", *(amount(size, UNITS) for size in SHOWN)]]
    rows.append(["---"] * len(rows[0]))
    for operation in OPERATIONS:
        sizes = sorted(size for name, size, library in times if (name, library) == (operation, "unisono"))
        row = [operation]
        for size in (sizes[0] if sizes else 0, *SHOWN):
            ours = times.get((operation, size, "unisono"))
            best = min((times.get((operation, size, name), math.inf) for name in MPI), default=math.inf)
            row.append("" if ours is None else f"{spoken(ours)} ({spoken(best)})")
        if any(row[1:]):
            rows.append(row)
    return [f"| {' | '.join(row)} |" for row in rows]


def files() -> dict[Path, str]:
    """Return every file that `make figures` writes, with its text."""
    return {FOLDER / f"{one.file}.svg": draw(one) for one in FIGURES}


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
        print(f"written: {path.relative_to(ROOT)}")
    if "--tables" in sys.argv:
        print("\n".join([*table("2026-11-21", 2), "", *table("2026-11-21", 4)]))


if __name__ == "__main__":
    main()
