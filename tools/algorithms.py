"""Print docs/algorithms.md: every algorithm of the catalogue, counted and priced on its plans.

`python tools/algorithms.py > docs/algorithms.md`; a test compares them. `python tools/algorithms.py OUT_DIR`
writes a page for every algorithm with its picture: index.md, COLLECTIVE-NAME.md, COLLECTIVE-NAME.svg and
COLLECTIVE-NAME-rounds.html. A page links only to files in OUT_DIR.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from unisono.commands.drawing.diagram import svg
from unisono.commands.drawing.page import html
from unisono.commands.drawing.trace import trace_plan
from unisono.engine.costs import plan_cost
from unisono.engine.costs.tuner import (
    BETWEEN,
    CANDIDATES,
    CROWD_RANKS,
    DIRECT_RANKS,
    INSIDE,
    ONE_SHOT_BYTES,
    REDUCING_S_PER_BYTE,
    Tuner,
)
from unisono.plans import ALGORITHMS, PLACED, Plan, Recv, Reduce, Send, make

SIZES = (4, 6, 8)
PLACEMENTS = {"2+2": (0, 0, 1, 1), "1+1+1+1": (0, 1, 2, 3), "3+2+1": (0, 0, 0, 1, 1, 2)}
PLACEMENTS["2+2+2+2"] = (0, 0, 1, 1, 2, 2, 3, 3)
TABLE = (f"| algorithm | rounds, p = {' / '.join(map(str, SIZES))} | messages | bytes / L | time | in |",)
TABLE += ("|---|---|---|---|---|---|",)
FOOTNOTE = "\n\\* depends on the host of each rank; the figures are those of one host."
BYTES = {"4 B": 4, "4 KiB": 4096, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "64 MiB": 1 << 26}

FEW, MANY = 4, 8
HOSTS = (0, 0, 1, 1)

PROMISES = {
    "broadcast": "Every rank ends with the root's buffer.",
    "reduce": "The root ends with the reduction of all buffers; the others keep theirs.",
    "all_reduce": "Every rank ends with the reduction of all buffers.",
    "gather": "The root ends with the blocks of all ranks.",
    "all_gather": "Every rank ends with the blocks of all ranks.",
    "scatter": "Every rank ends with its block of the root's.",
    "reduce_scatter": "Every rank ends with its block of the reduction of all buffers.",
    "all_to_all": "Rank r ends with block r of every rank.",
    "scan": "Rank r ends with the reduction of the buffers of ranks 0 to r.",
    "exclusive_scan": "Rank r ends with the reduction of the buffers of ranks 0 to r-1.",
    "barrier": "No rank returns before every rank has called it.",
}

HEAD = """# Algorithms

Generated from the plans by `python tools/algorithms.py > docs/algorithms.md`; do not edit.

Unisono [chooses](#what-is-chosen) an algorithm for each call; `algorithm=` selects one by its name. The
tables have four figures for {sizes} ranks of one host:

- **rounds**: how many latencies the operation pays one after the other.
- **messages**: the most that one rank sends. Consecutive sends to the same ranks count as one message.
- **bytes / L**: the most that one rank sends. L is the size of the whole buffer, or of the larger one where
  input and output differ.
- **time** until the last rank is done. A message of l bytes takes a + b l; reducing l bytes takes g l. The
  terms in a, b and g are computed separately and added.

In this model (`engine/costs/simulation.py`) a rank sends one message at a time and receives one at a time.
Within one host the engine writes a message once for all its readers, so the direct algorithms are faster
there than the tables say. Algorithms that reduce in several hops round 16-bit floats at each hop.

The tests prove every plan for 1 to 17, 32, 33 and 64 ranks; plans that depend on hosts also for uneven hosts.
`prove(make(collective, name, size))` proves any other size.
"""

LINKS_HEAD = """
## Bytes between hosts

all_reduce: the most bytes that leave a host, and the most that enter one, as a fraction of the buffer. 3+2+1
stands for three hosts with 3, 2 and 1 ranks.
"""
LINKS_TAIL = """
No algorithm has a maximum below 2(h-1)/h for h hosts; `hierarchical` reaches it, on uneven hosts too.
`aggregator` loads the host that reduces; every other host sends and receives the buffer once."""

CHOICES_HEAD = """
## What is chosen

On one host:

- all_reduce takes `one_shot` while (p-1) times the bytes are at most {one_shot} KiB, else `two_shot`.
- Everything else takes `direct`.
- With more than {ranks} ranks `leaders` takes the place of `one_shot`, and of `direct` for barrier; with more
  than {crowd} also that of `two_shot`.

On several hosts Unisono takes the cheapest of a few candidates by the cost model (`engine/costs/tuner.py`).
The table holds for the model's defaults: {inside} within a host, {between}
between hosts, {reducing} for reducing. Bytes are those of one rank, for all_gather and reduce_scatter
those of one block.
"""
CHOICES_TAIL = """
gather, scatter and exclusive_scan always take `direct`. The blocks of gather and scatter may differ in size,
and only the two ranks of an edge know that size."""

PICTURE_HEAD = """
## A plan, drawn

`unisono draw` draws any plan ([how](new-algorithm.md#draw-it)). As text, a plan has one line per rank:
`2->5` sends chunk 2 to rank 5, `2<-5` receives it from rank 5, `2=1+5` reduces chunk 2 of ranks 1 and 5.
Here ranks 0 and 1 are on one host, rank 2 on another:"""


def row(collective: str, algorithm: str) -> str:
    """One line of a collective's table."""
    plans = [make(collective, algorithm, size) for size in SIZES]
    counts = [
        " / ".join(str(max(count(plan))) for plan in plans)
        for count in (lambda plan: [plan_cost.rounds(plan)], plan_cost.messages, plan_cost.bytes_sent)
    ]
    if collective == "barrier":
        counts[2] = "0"
    prices = " / ".join(plan_cost.formula(plan) for plan in plans)
    mark = " *" if algorithm in PLACED.get(collective, {}) else ""
    return f"| {algorithm}{mark} | {' | '.join(counts)} | {prices} | {module(collective, algorithm)} |"


def module(collective: str, algorithm: str) -> str:
    """Where an algorithm is written."""
    return f"`{ALGORITHMS[collective][algorithm].__module__.rsplit('.', 1)[1]}.py`"


def sources() -> Iterator[str]:
    """The papers that the modules name."""
    yield "\n## Sources\n"
    for name in sorted({function.__module__ for known in ALGORITHMS.values() for function in known.values()}):
        yield f"- `{name.rsplit('.', 1)[1]}.py`: {source(name)}"


def source(module_name: str) -> str:
    """The paper that a module names."""
    doc = sys.modules[module_name].__doc__ or ""
    return " ".join(doc.split("Source: ")[1].split())


def tables() -> Iterator[str]:
    """A table for every collective."""
    for collective, algorithms in ALGORITHMS.items():
        yield f"\n## {collective}\n"
        yield from TABLE
        yield from (row(collective, algorithm) for algorithm in algorithms)
    yield FOOTNOTE


def links() -> Iterator[str]:
    """The bytes between hosts, in all_reduce."""
    yield LINKS_HEAD
    yield f"| algorithm | {' | '.join(PLACEMENTS)} |"
    yield "|---|" + "---|" * len(PLACEMENTS)
    for algorithm in ALGORITHMS["all_reduce"]:
        found = []
        for hosts in PLACEMENTS.values():
            passed = plan_cost.link_bytes(make("all_reduce", algorithm, len(hosts), 0, hosts)).values()
            found.append(f"{max(out for out, _ in passed)}, {max(into for _, into in passed)}")
        yield f"| {algorithm} | {' | '.join(found)} |"
    yield LINKS_TAIL


def choices() -> Iterator[str]:
    """Which algorithm is chosen when."""
    yield CHOICES_HEAD.format(
        one_shot=ONE_SHOT_BYTES >> 10,
        ranks=DIRECT_RANKS,
        crowd=CROWD_RANKS,
        inside=f"a = {INSIDE.a * 1e6:g} us and {1e-9 / INSIDE.b:.0f} GB/s",
        between=f"a = {BETWEEN.a * 1e6:g} us and {1e-9 / BETWEEN.b:.0f} GB/s",
        reducing=f"{1e-9 / REDUCING_S_PER_BYTE:.0f} GB/s",
    )
    yield f"| collective | hosts | {' | '.join(BYTES)} |"
    yield "|---|---|" + "---|" * len(BYTES)
    for collective, candidates in CANDIDATES.items():
        if len(candidates) == 1 or collective == "barrier":
            continue
        for name, hosts in PLACEMENTS.items():
            chooser = Tuner(len(hosts), hosts)
            taken = [chooser.choose(collective, nbytes) for nbytes in BYTES.values()]
            yield f"| {collective} | {name} | {' | '.join(taken)} |"
    yield CHOICES_TAIL


def picture(plan: Plan) -> Iterator[str]:
    """What each rank sends, receives and reduces, step by step."""
    lines = [[_word(step) for step in steps if not isinstance(step, Send) or step.to] for steps in plan.steps]
    longest = max(map(len, lines))
    widths = [max(len(line[n]) for line in lines if n < len(line)) for n in range(longest)]
    yield f"\n    {plan}, hosts {plan.hosts}"
    for rank, line in enumerate(lines):
        yield f"    rank {rank}  " + "  ".join(word.ljust(widths[n]) for n, word in enumerate(line)).rstrip()


def _word(step: object) -> str:
    if isinstance(step, Send):
        return f"{step.chunk.index}->{','.join(map(str, step.to))}"
    if isinstance(step, Reduce):
        return f"{step.chunk.index}={'+'.join(map(str, step.frm))}"
    return f"{step.chunk.index}<-{step.frm}" if isinstance(step, Recv) else "copy"


def markdown() -> str:
    """The text of docs/algorithms.md."""
    lines = [HEAD.format(sizes=", ".join(map(str, SIZES))), *tables(), *links(), *choices(), *sources()]
    lines.append(PICTURE_HEAD)
    lines += picture(make("all_reduce", "hierarchical", 3, 0, (0, 0, 1)))
    return "\n".join(line.rstrip(" ") for line in lines) + "\n"


# ---- a page for each algorithm -----------------------------------------------------------------------


def plan_of(collective: str, algorithm: str) -> Plan:
    """The plan to draw: 4 ranks, 8 where that takes few rounds, on two hosts where hosts matter."""
    if algorithm in PLACED.get(collective, {}):
        return make(collective, algorithm, len(HOSTS), 0, HOSTS)
    more = make(collective, algorithm, MANY)
    return more if plan_cost.rounds(more) < MANY - 1 else make(collective, algorithm, FEW)


def page(collective: str, algorithm: str) -> Iterator[str]:
    """The lines of an algorithm's page."""
    name, plan = f"{collective}-{algorithm}", plan_of(collective, algorithm)
    function = ALGORITHMS[collective][algorithm]
    hosts = " --hosts 2x2" if plan.hosts else f" -n {plan.size}"
    doc = (inspect.getdoc(function) or "").partition("\n")[0]
    yield f"# {collective}: {algorithm}\n"
    yield f"{PROMISES[collective]} {doc}\n"
    yield f"[![{plan}: who sends which chunk to whom, round by round]({name}.svg)]({name}.svg)\n"
    yield f"[Round by round]({name}-rounds.html): forward, back, and what each rank holds.\n"
    yield f"    unisono draw {collective} --algorithm {algorithm}{hosts} -o {name}.svg\n"
    yield from (*TABLE, row(collective, algorithm), FOOTNOTE)
    yield f"\n## Source\n\nFrom `src/unisono/plans/{module(collective, algorithm).strip('`')}`:\n"
    yield f"```python\n{inspect.getsource(function).rstrip()}\n```\n"
    yield f"{source(function.__module__)}"


def index() -> Iterator[str]:
    """The lines of the list of all pages."""
    yield "# Algorithms as pictures\n"
    yield "Each picture is drawn from the plan that is proved, and that the engine runs. `unisono draw` draws"
    yield "them for other numbers of ranks and hosts, and algorithms of your own."
    for collective, algorithms in ALGORITHMS.items():
        yield f"\n## {collective}\n\n{PROMISES[collective]}\n"
        yield from TABLE
        for algorithm in algorithms:
            _, first, rest = row(collective, algorithm).split("|", 2)
            yield f"| [{first.strip()}]({collective}-{algorithm}.md) |{rest}"
    yield FOOTNOTE


def write_pages(folder: Path) -> None:
    """Write all pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"index.md": "\n".join(index()) + "\n"}
    for collective, algorithm in ((name, one) for name, known in ALGORITHMS.items() for one in known):
        picture, name = trace_plan(plan_of(collective, algorithm)), f"{collective}-{algorithm}"
        texts |= {f"{name}.svg": svg(picture), f"{name}-rounds.html": html(picture)}
        texts[f"{name}.md"] = "\n".join(page(collective, algorithm)) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write_pages(Path(sys.argv[1]))
    else:
        sys.stdout.write(markdown())
