"""Decoders are made when a module is imported, by one thread.

msgspec fills its record of a Struct type at the type's first decoding. Another thread that decodes the
same type at that moment reads a record that is half filled: SIGSEGV (msgspec 0.22).
"""

import ast
from pathlib import Path

import pytest

import unisono

SOURCES = sorted(Path(unisono.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_decode_call_names_a_type(source: Path) -> None:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decode":
            assert not any(keyword.arg == "type" for keyword in node.keywords), f"line {node.lineno}"
