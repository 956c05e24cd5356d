"""Requires a reason for a file above 400 lines, and limits a function to 60. Prints each room's lines.

Python functions are measured by `ast`. C++ ones by a brace heuristic that relies on clang-format's layout:
a body opens with a `{` at the end of a line and closes with a `}` at that line's indentation.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILE_LINES = 400
FUNCTION_LINES = 60

# Files above 400 lines, with the reason why each is one concept. Cutting one in two would be worse.
WHOLE: dict[str, str] = {
    "csrc/python/calls.cpp": "the way of every call: the methods of Group, what they remember, how they run",
    "csrc/engine/engine.cpp": "one rank of one group: it numbers, runs, queues and ends its operations",
    "csrc/engine/executor.cpp": "one interpreter of plans, see docs/adr/0001-one-interpreter.md",
    "src/unisono/engine/environment/env.py": "the table of the environment's variables, and what reads it",
    "src/unisono/engine/group/group.py": "Group: every operation of the user; mostly signatures",
    "src/unisono/parallel/graph/rules.py": "the rule of each operator, and their table",
    "src/unisono/parallel/swap.py": "one object between forward, backward and update: what is in memory when",
    "src/unisono/plans/proof.py": "the proof of a plan: one symbolic run, and what must hold at its end",
    "src/unisono/commands/launch/failures.py": "the failures of a job: read, ordered, reported once",
    "src/unisono/commands/launch/job.py": "a job: its command line, its ranks' environment",
    "src/unisono/engine/store/tcp_server.py": "the store's server: one selector loop and its peers",
}

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("src", "csrc", "tests", "tools", "benchmarks", "examples")
CPP = (".cpp", ".hpp", ".h", ".c", ".cc")
NOT_FUNCTIONS = re.compile(
    r"\s*(namespace|class|struct|union|enum|extern|if|else|for|while|do|switch|case|default|try|catch|return)\b"
)


class Measured(NamedTuple):
    """A file or a function, its number of lines, and its limit."""

    name: str
    lines: int
    budget: int


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield (name, lines) of every function, from its `def` to its last line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield (name, lines) of every function-like block: its head has a `(` and is no control statement."""
    lines = [line.split("//")[0].rstrip() for line in text.splitlines()]
    opened: list[tuple[int, str]] = []  # first line of the head, name
    for number, line in enumerate(lines):
        while line.lstrip().startswith("}") and opened and _indent(line) <= _indent(lines[opened[-1][0]]):
            first, name = opened.pop()
            if name:
                yield name, number - first + 1
        if line.endswith("{"):
            first = _first_of_head(lines, number)
            opened.append((first, _cpp_name(" ".join(lines[first : number + 1]))))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _first_of_head(lines: list[str], number: int) -> int:
    """Find the first line of the statement whose body opens on line `number`: parentheses must balance."""
    first = number
    while first > 0 and (
        "".join(lines[first : number + 1]).count(")") > "".join(lines[first : number + 1]).count("(")
        or lines[first].lstrip().startswith(":")
        or lines[first - 1].endswith((",", "(", "&&", "||", "="))
    ):
        first -= 1
    return first


def _cpp_name(head: str) -> str:
    """Return the function of a head; "" for a namespace, a class or a control statement."""
    head = head.strip().lstrip("} ")
    if NOT_FUNCTIONS.match(head) or "(" not in head:
        return ""
    if re.search(r"\[[^\[\]]*\]\s*(\(|\{|mutable\b)", head):
        return "lambda"
    name = re.search(r"(operator\s*\S+?|[\w:~]+)\s*\(", head)
    return name.group(1) if name else ""


def files() -> Iterator[Path]:
    """Yield every source file of every room."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix == ".py" or path.suffix in CPP:
                yield path


def measure(path: Path) -> Iterator[Measured]:
    """Yield the file and its functions."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    yield _measured(name, len(text.splitlines()), FILE_LINES)
    functions = python_functions if path.suffix == ".py" else cpp_functions
    for function, lines in functions(text):
        yield _measured(f"{name}::{function}", lines, FUNCTION_LINES)


def _measured(name: str, lines: int, budget: int) -> Measured:
    return Measured(name, lines, sys.maxsize if name in WHOLE else budget)


def room_of(path: Path) -> str:
    """The room: src/unisono/plans -> "src/unisono/plans", tests/unit -> "tests/unit", csrc -> "csrc"."""
    return path.relative_to(ROOT).parent.as_posix()


def stale_reasons(seen: dict[str, int]) -> Iterator[str]:
    """Yield the reasons for long files that are no longer needed."""
    for name in WHOLE:
        if seen.get(name, 0) <= FILE_LINES:
            yield f"the reason for {name} is not needed any more"


def main() -> int:
    """Print lines per room, then the files and functions over budget."""
    rooms: Counter[str] = Counter()
    seen: dict[str, int] = {}
    complaints = []
    for path in files():
        for name, lines, budget in measure(path):
            seen[name] = max(lines, seen.get(name, 0))
            if "::" not in name:
                rooms[room_of(path)] += lines
            if lines > budget:
                complaints.append(f"{name} has {lines} lines, its budget is {budget}")
    complaints += stale_reasons(seen)
    for room, lines in sorted(rooms.items()):
        print(f"{lines:7}  {room}")
    print(f"{sum(rooms.values()):7}  in all")
    for complaint in complaints:
        print(f"over budget: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
