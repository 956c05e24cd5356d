"""Print docs/algorithms.md: every algorithm of the catalogue, counted and priced on its plans.

`python tools/algorithms.py > docs/algorithms.md`; a test compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from unisono.costs import price
from unisono.costs.choice import BETWEEN, CANDIDATES, INSIDE, REDUCING_S_PER_BYTE, Chooser
from unisono.plans import ALGORITHMS, PLACED, Plan, Recv, Reduce, Send, make

SIZES = (4, 6, 8)
PLACEMENTS = {"2+2": (0, 0, 1, 1), "1+1+1+1": (0, 1, 2, 3), "3+2+1": (0, 0, 0, 1, 1, 2)}
PLACEMENTS["2+2+2+2"] = (0, 0, 1, 1, 2, 2, 3, 3)
BYTES = {"4 B": 4, "4 KB": 4096, "64 KB": 1 << 16, "1 MB": 1 << 20, "64 MB": 1 << 26}

HEAD = """# Algorithms

Generated from the plans by `python tools/algorithms.py > docs/algorithms.md`; do not edit.

For each algorithm and {sizes} ranks of one host: **rounds**, how often a latency is paid one after the
other; **messages** and **bytes**, the most that one rank sends; and the **time** until the last rank is done,
where a message of l bytes takes a + b l, adding takes g per byte, and L is the size of the whole buffer (of
the larger one, where input and output differ). Every rank sends one message and takes one at a time
(`unisono/costs/timing.py`); sends that stand side by side and go to the same ranks are one message. Within
one host the engine writes once for all readers, so there the direct algorithms are better than this
says. Time is counted with a, b and g each alone, and added up. The tests prove every plan for 1 to 17, 32, 33
and 64 ranks, and those that use hosts for uneven ones; `prove(make(collective, name, size))` does so for any
other number. `algorithm=` asks for one by name. 16-bit floats are rounded at each hop.
"""


def row(collective: str, algorithm: str) -> str:
    """One line of a collective's table."""
    plans = [make(collective, algorithm, size) for size in SIZES]
    counts = [
        " / ".join(str(max(count(plan))) for plan in plans)
        for count in (lambda plan: [price.rounds(plan)], price.messages, price.bytes_sent)
    ]
    if collective == "barrier":
        counts[2] = "0"
    prices = " / ".join(price.formula(plan) for plan in plans)
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
        sizes = " / ".join(map(str, SIZES))
        yield f"| algorithm | rounds, p = {sizes} | messages | bytes / L | time | in |"
        yield "|---|---|---|---|---|---|"
        yield from (row(collective, algorithm) for algorithm in algorithms)
    yield "\n\\* asks which host each rank is on; the numbers are those of one host."


def links() -> Iterator[str]:
    """What passes the links of hosts, in all_reduce."""
    yield "\n## What passes the links between hosts\n"
    yield "all_reduce: the most bytes that leave a host, and that enter one, as a part of the buffer.\n"
    yield f"| algorithm | {' | '.join(PLACEMENTS)} |"
    yield "|---|" + "---|" * len(PLACEMENTS)
    for algorithm in ALGORITHMS["all_reduce"]:
        found = []
        for hosts in PLACEMENTS.values():
            passed = price.link_bytes(make("all_reduce", algorithm, len(hosts), 0, hosts)).values()
            found.append(f"{max(out for out, _ in passed)}, {max(into for _, into in passed)}")
        yield f"| {algorithm} | {' | '.join(found)} |"
    yield "\nThe bound is 2(h-1)/h for h hosts; `hierarchical` meets it, however uneven the hosts are."
    yield "`aggregator` can go below it everywhere but on the host that adds."


def choices() -> Iterator[str]:
    """What is taken when."""
    yield "\n## What is chosen\n"
    between = f"a = {BETWEEN.a * 1e6:g} us and {1e-9 / BETWEEN.b:.0f} GB/s between hosts"
    yield "On one host: all_reduce takes one_shot while (p-1) times the bytes are at most 16 KB, then"
    yield "two_shot; barrier takes dissemination; everything else takes direct. On several hosts the cheapest"
    yield "of a few candidates is taken,"
    yield f"at a = {INSIDE.a * 1e6:g} us and {1e-9 / INSIDE.b:.0f} GB/s within a host,"
    yield f"{between}, {1e-9 / REDUCING_S_PER_BYTE:.0f} GB/s added (`unisono/costs/choice.py`):\n"
    yield f"| collective | hosts | {' | '.join(BYTES)} |"
    yield "|---|---|" + "---|" * len(BYTES)
    for collective, candidates in CANDIDATES.items():
        if len(candidates) == 1 or collective == "barrier":
            continue
        for name, hosts in PLACEMENTS.items():
            chooser = Chooser(len(hosts), hosts)
            taken = [chooser.choose(collective, nbytes) for nbytes in BYTES.values()]
            yield f"| {collective} | {name} | {' | '.join(taken)} |"
    yield "\ngather, scatter and exclusive_scan take direct, whatever the hosts: with blocks of different"
    yield "sizes only ranks at the ends know them. Bytes are those of one rank, of a block for all_gather and"
    yield "reduce_scatter."


def picture(plan: Plan) -> Iterator[str]:
    """Who sends which chunk to whom, and what is taken, step by step."""
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
    lines += [
        "\n## A plan, drawn\n",
        "`unisono draw` draws any of these ([how](new-algorithm.md#draw-it)). In one line for each rank:",
        "`2->5` sends chunk 2 to rank 5, `2<-5` takes it, `2=1+5` adds what ranks 1 and 5",
    ]
    lines += ["have of it. Two hosts, one with ranks 0 and 1, one with rank 2:"]
    lines += picture(make("all_reduce", "hierarchical", 3, 0, (0, 0, 1)))
    return "\n".join(line.rstrip(" ") for line in lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
