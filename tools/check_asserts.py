"""No `assert` of src/unisono decides anything: `python -O` drops all of them.

An assert may tell a type checker what is known: `x is not None`, `isinstance(x, T)`, their negations, joined
by `and`. It calls nothing else, assigns nothing and iterates over nothing. What depends on input is raised.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def narrows(test: ast.expr) -> bool:
    """Whether an expression only says which type a value has."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and all(map(narrows, test.values))
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not) and _is_instance(test.operand)
    if isinstance(test, ast.Compare):
        of_none = isinstance(test.ops[0], ast.IsNot) and ast.unparse(test.comparators[0]) == "None"
        return len(test.ops) == 1 and of_none and _is_place(test.left)
    return _is_instance(test)


def _is_instance(test: ast.expr) -> bool:
    if not isinstance(test, ast.Call) or test.keywords:
        return False
    return ast.unparse(test.func) == "isinstance" and all(map(_is_type_or_place, test.args))


def _is_type_or_place(part: ast.expr) -> bool:
    if isinstance(part, ast.Tuple):
        return all(map(_is_place, part.elts))
    return _is_place(part)


def _is_place(part: ast.expr) -> bool:
    """A name, its attributes, and their elements under a constant: `self.x[0]`."""
    while isinstance(part, (ast.Attribute, ast.Subscript)):
        if isinstance(part, ast.Subscript) and not isinstance(part.slice, ast.Constant):
            return False
        part = part.value
    return isinstance(part, ast.Name)


def complaints(source: str, name: str) -> list[str]:
    """The asserts of a file that do more."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    wrong = [node for node in found if node.msg is not None or not narrows(node.test)]
    return [f"{name}:{node.lineno}: {ast.unparse(node)}: raise an error; -O drops it" for node in wrong]


def main() -> int:
    """Print the asserts that decide something."""
    files = sorted((ROOT / "src").rglob("*.py"))
    found = [line for path in files for line in complaints(path.read_text(), str(path.relative_to(ROOT)))]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
