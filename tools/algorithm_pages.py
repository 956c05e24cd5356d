"""Write a page for every algorithm of the catalogue: its picture, its cost, its source.

`python tools/algorithm_pages.py OUT_DIR` writes index.md, and for each algorithm COLLECTIVE-NAME.md,
COLLECTIVE-NAME.svg and COLLECTIVE-NAME-rounds.html. A page links only to files in OUT_DIR.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType

from algorithms import BYTES, PLACEMENTS, SIZES, module, row, source

from unisono.costs import price
from unisono.costs.choice import Chooser
from unisono.drawing.diagram import svg
from unisono.drawing.page import html
from unisono.drawing.picture import depict
from unisono.plans import ALGORITHMS, CONTRACTS, PLACED, Plan, make

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


def plan_of(collective: str, algorithm: str) -> Plan:
    """The plan to draw: 4 ranks, 8 where that takes few rounds, on two hosts where hosts matter."""
    if algorithm in PLACED.get(collective, {}):
        return make(collective, algorithm, len(HOSTS), 0, HOSTS)
    more = make(collective, algorithm, MANY)
    return more if price.rounds(more) < MANY - 1 else make(collective, algorithm, FEW)


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
    yield "## Cost\n"
    yield from cost(collective, algorithm)
    chosen = sorted(where(collective, algorithm))
    if chosen:
        yield f"\nUnisono chooses it, among other cases, for {'; '.join(chosen)}."
    yield f"\n## Source\n\nFrom `src/unisono/plans/{module(collective, algorithm).strip('`')}`:\n"
    yield f"```python\n{code(function)}\n```\n"
    yield f"{source(function.__module__)}"


def code(function: Callable[..., object]) -> str:
    """The source of a function, and of the functions of its module that it calls."""
    found, wanted = [], [function]
    while wanted:
        one = wanted.pop(0)
        found.append(one)
        for name in (name for part in _parts(one.__code__) for name in part.co_names):
            called = one.__globals__.get(name)
            if inspect.isfunction(called) and called.__module__ == one.__module__:
                wanted += [called] if called not in (*found, *wanted) else []
    return "\n\n\n".join(inspect.getsource(one).rstrip() for one in found).replace("  # noqa: ARG001", "")


def _parts(compiled: CodeType) -> list[CodeType]:
    """The code of a function, and of the generators and functions inside it."""
    inner = [each for each in compiled.co_consts if isinstance(each, CodeType)]
    return [compiled, *(part for each in inner for part in _parts(each))]


def cost(collective: str, algorithm: str) -> Iterator[str]:
    """The table of an algorithm's cost for a few sizes."""
    yield "| ranks | rounds | messages of a rank | bytes / L of a rank | time |"
    yield "|---|---|---|---|---|"
    for size in SIZES:
        plan = make(collective, algorithm, size)
        sent = max(price.bytes_sent(plan)) if CONTRACTS[collective].counts else 0
        most = max(price.messages(plan))
        yield f"| {size} | {price.rounds(plan)} | {most} | {sent} | {price.formula(plan)} |"
    yield "\nOn one host: a message of l bytes takes a + b l, reducing g per byte, L is the whole buffer."
    yield "Every rank sends one message at a time and takes one at a time."


def where(collective: str, algorithm: str) -> Iterator[str]:
    """The placements and sizes in the table of choices that select it."""
    for placement, hosts in {"one host": (0,) * FEW, **PLACEMENTS}.items():
        chooser = Chooser(len(hosts), hosts)
        sizes = [name for name, nbytes in BYTES.items() if chooser.choose(collective, nbytes) == algorithm]
        if len(sizes) == len(BYTES):
            yield f"hosts {placement}" if hosts[-1] else placement
        elif sizes:
            at = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
            yield f"{f'hosts {placement}' if hosts[-1] else placement} at {at}"


def index() -> Iterator[str]:
    """The lines of the list of all pages."""
    yield "# Algorithms as pictures\n"
    yield "Each picture is drawn from the plan that is proved, and that the engine runs. `unisono draw` draws"
    yield "them for other numbers of ranks and hosts, and algorithms of your own."
    for collective, algorithms in ALGORITHMS.items():
        yield f"\n## {collective}\n\n{PROMISES[collective]}\n"
        yield f"| algorithm | rounds, p = {' / '.join(map(str, SIZES))} | messages | bytes / L | time | in |"
        yield "|---|---|---|---|---|---|"
        for algorithm in algorithms:
            _, first, rest = row(collective, algorithm).split("|", 2)
            yield f"| [{first.strip()}]({collective}-{algorithm}.md) |{rest}"
    yield "\n\\* depends on the host of each rank; the figures are those of one host."


def main(argv: list[str]) -> int:
    """Write all pages into the given folder. Exit code: 0; 2: wrong usage."""
    if len(argv) != 1:
        print("usage: python tools/algorithm_pages.py OUT_DIR", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.md").write_text("\n".join(index()) + "\n", encoding="utf-8")
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            picture, name = depict(plan_of(collective, algorithm)), f"{collective}-{algorithm}"
            (folder / f"{name}.svg").write_text(svg(picture), encoding="utf-8")
            (folder / f"{name}-rounds.html").write_text(html(picture), encoding="utf-8")
            (folder / f"{name}.md").write_text(
                "\n".join(page(collective, algorithm)) + "\n", encoding="utf-8"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
