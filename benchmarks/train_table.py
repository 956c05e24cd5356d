"""Plans against DDP and FSDP2: time, bytes and memory of a step, as the tables of docs/performance.md.

    python benchmarks/train.py table                            all shapes; minutes on two quiet cores
    python benchmarks/train.py table --shapes row,memory        some
    python benchmarks/train.py table --ways ddp,tensor,pipeline
    python benchmarks/train.py table --tiny --rounds 1 --steps 1        shows that everything runs

A shape is a model, a batch and the memory that a rank may take (SHAPES). Every way has its own processes, and
all take turns. `one process` trains on all rows in one process. Before that every way trains a few steps, and
the losses have to agree.

- ms: of a step (forward, backward, AdamW) on the slowest rank: the median over rounds of the round's median.
- to DDP: the median over rounds of the ratio to DDP within the round.
- MB received: by the rank that receives most, in a step. The shapes of the collectives give it exactly.
- MB held: the most that a rank has held (VmHWM), less what it held before it had a model.

A way that needs more memory than a rank has `does not fit`: the kernel refuses it (RLIMIT_DATA).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from training_ways import ALONE, COMPARED_STEPS, same, width_of
from turns import ROOT, WorkerGroup, arguments, metered, ranks_run, take_turns, write

from unisono.commands.bench.measure import Timing, ratio
from unisono.commands.bench.worker_group import BenchError

BASE = "ddp"
TITLES = {
    ALONE: "one process",
    BASE: "DDP",
    "fsdp2": "FSDP2",
    "up0": "`data={n}`",
    "up3": "`data={n}, zero=3`",
    "tensor": "`tensor={n}`",
    "sequence": "`tensor={n}, sequence=True`",
    "pipeline": "`pipeline={n}`",
    "context": "`context={n}`",
}
WAYS = tuple(way for way in TITLES if way != "sequence")


@dataclass(frozen=True)
class Shape:
    """A model, a batch, and the memory of a rank."""

    about: str
    model: str
    rows: int  # of all ranks
    context: int
    limit_mb: int | None = None

    def tiny(self) -> Shape:
        """The same in a moment; every way fits."""
        return replace(self, model="70K", context=16, limit_mb=None)

    @property
    def text(self) -> str:
        """The line above its table."""
        limit = f"; a rank may take {self.limit_mb} MB" if self.limit_mb else ""
        return f"{self.about}: {self.rows} x {self.context} bytes a step{limit}"


SHAPES = {
    "rows": Shape("rows for every rank", "10M", rows=4, context=64),
    "row": Shape("one row", "10M", rows=1, context=64),
    "long": Shape("one long row", "2M", rows=1, context=2048),
    "memory": Shape("a model that fits on no rank", "40M", rows=2, context=64, limit_mb=650),
}


@dataclass(frozen=True)
class Row:
    """One way in one shape."""

    way: str
    millis: float
    to_base: float | None
    received_mb: float
    held_mb: float


class Sides:
    """A set of processes for each way; those that do not fit have ended."""

    def __init__(self, ways: list[str], ranks: int, program: str, stack: ExitStack) -> None:
        self._groups = {
            way: WorkerGroup("unisono-torch", 1 if way == ALONE else ranks, ranks_run(program))
            for way in ways
        }
        for side in self._groups.values():
            stack.enter_context(side)
        self.refused: dict[str, str] = {}

    def train(self, shape: Shape) -> tuple[dict[str, list[float]], dict[str, float], int]:
        """Bind every way and train some steps: losses, the most that a rank held, the parameters."""
        losses, held, parameters = {}, {}, 0
        for way, side in self._groups.items():
            try:
                self._bind(way, shape.tiny())  # libraries and threads come first
                side.ask({"do": "losses", "way": way, "steps": 1})
                parameters = self._bind(way, shape)
                losses[way] = side.ask({"do": "losses", "way": way, "steps": COMPARED_STEPS})[0]["losses"]
                held[way] = max(answer["peak"] for answer in side.ask({"do": "peak"}))
            except BenchError as error:
                if shape.limit_mb is None or "memory" not in str(error):
                    raise
                self.refused[way] = str(error)
                print(f"# {way} does not fit: {str(error)[:160]}", flush=True)
                side.kill()
        return losses, held, parameters

    def _bind(self, way: str, shape: Shape) -> int:
        command = {"do": "bind", "way": way, "width": width_of(shape.model), "rows": shape.rows}
        command |= {"context": shape.context, "limit_mb": shape.limit_mb}
        return int(self._groups[way].ask(command)[0]["parameters"])

    def measure(self, ways: list[str], rounds: int, steps: int) -> tuple[dict[str, float], dict[str, Timing]]:
        """The bytes that a rank receives in a step of each way, and how long it takes."""
        received = {}
        for way in ways:
            answers = self._groups[way].ask({"do": "received", "way": way})
            received[way] = max(answer["bytes"] for answer in answers)
        turns = {way: (self._groups[way], way) for way in ways}
        with metered([side for side, _ in turns.values()]):
            return received, take_turns(turns, rounds=rounds, calls=steps)


def rows_of(shape: Shape, args: Any, program: str, ways: list[str]) -> tuple[str, list[Row], dict[str, str]]:
    """Measure the ways of one shape: its title, a row for each way that fits, why the others do not."""
    with ExitStack() as stack:
        sides = Sides(ways, args.ranks, program, stack)
        losses, held, parameters = sides.train(shape)
        difference = same(losses)
        received, timings = sides.measure(list(losses), args.rounds, args.steps)
    title = f"{shape.text}, {parameters / 1e6:.1f} million parameters, losses differ by {difference:.1e}"
    base = timings.get(BASE)
    rows = [
        Row(
            way,
            timing.p50_us / 1e3,
            None if base is None else ratio(timing, base),
            received[way] / 1e6,
            held[way] / 1e6,
        )
        for way, timing in timings.items()
    ]
    return title, rows, sides.refused


def show(title: str, rows: list[Row], refused: dict[str, str], ways: list[str], ranks: int) -> None:
    """Print a table as a page has it."""
    found = {row.way: row for row in rows}
    print(
        f"\n{title[0].upper()}{title[1:]}\n\n| | ms | to DDP | MB received | MB held |\n|---|---|---|---|---|"
    )
    for way in ways:
        name = TITLES[way].format(n=ranks)
        if way in refused:
            print(f"| {name} | does not fit | | | |")
            continue
        row = found[way]
        to_base = "" if row.to_base is None else f"{row.to_base:.2f}"
        print(f"| {name} | {row.millis:.1f} | {to_base} | {row.received_mb:.2f} | {row.held_mb:.0f} |")


def main(words: list[str] | None = None) -> None:
    """Measure and print the tables."""
    parser = arguments(__doc__)
    add: Callable[..., Any] = parser.add_argument
    add("table", choices=["table"])
    add("--ranks", type=int, default=2, help="processes of a way (default 2)")
    add("--shapes", default=",".join(SHAPES), help=f"comma list of {', '.join(SHAPES)}")
    add("--ways", default=",".join(WAYS), help=f"comma list of {', '.join(TITLES)}")
    add("--steps", type=int, default=5, help="steps in a turn (default 5)")
    add("--tiny", action="store_true", help="models that take no time, without a limit of memory")
    args = parser.parse_args(words)
    ways, shapes, records = args.ways.split(","), args.shapes.split(","), {}
    for given, known in ((ways, TITLES), (shapes, SHAPES)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    for name in shapes:
        shape = SHAPES[name].tiny() if args.tiny else SHAPES[name]
        title, rows, refused = rows_of(shape, args, str(ROOT / "benchmarks" / "train.py"), ways)
        show(title, rows, refused, ways, args.ranks)
        records[name] = {"title": title, "refused": refused, "ways": {row.way: vars(row) for row in rows}}
    write(args.json, {"ranks": args.ranks, "shapes": records})
