"""The tests themselves: a file is known by its name, the fast part covers every room, programs are files."""

import ast
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LINES = 3  # of a program that may be a string
NAMED_BY_OTHERS = {"conftest.py", "sitecustomize.py"}  # pytest and Python look for these
OF_THEIR_OWN = {TESTS / "launchers"}  # norecursedirs in pyproject.toml: `make test-launchers` runs it


def test_file_names_are_unique() -> None:
    """A report of a failure, and a search for a file, name it without its folder."""
    counts = Counter(path.name for path in TESTS.rglob("*.py"))
    assert {name for name, count in counts.items() if count > 1} <= NAMED_BY_OTHERS


def test_the_fast_part_covers_every_room() -> None:
    entries = (TESTS / "fast.txt").read_text().split()
    listed = {entry.split("::")[0] for entry in entries if not entry.startswith("-")}
    rooms = {path.parent for path in TESTS.glob("*/test_*.py")} - OF_THEIR_OWN
    assert rooms <= {
        room for entry in listed for room in (TESTS.parent / entry, (TESTS.parent / entry).parent)
    }
    left_out = [entry.removeprefix("--deselect=") for entry in entries if entry.startswith("-")]
    for entry in [*listed, *(one.split("::")[0] for one in left_out)]:
        assert (TESTS.parent / entry).exists(), f"fast.txt names {entry}, which there is not"
    for entry in entries:
        path, _, name = entry.removeprefix("--deselect=").partition("::")
        assert not name or f"def {name}(" in (TESTS.parent / path).read_text(), f"there is no {entry}"


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the value of every string that is not a statement; what an f-string inserts is a name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        else:
            yield from texts(node)


def is_program(text: str) -> bool:
    """Whether this is Python of more than a few lines, with an import or a call of a method."""
    if len([line for line in text.splitlines() if line.strip()]) <= LINES:
        return False
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(text))))
    except SyntaxError:
        return False
    return any(
        isinstance(node, (ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
        for node in nodes
    )


def test_programs_are_files_that_the_linter_sees() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, text in texts(ast.parse(path.read_text()))
        if is_program(text)
    ]
    assert not found, f"programs in strings; make them files, as in tests/multiproc/programs: {found}"
