"""docs/errors.md shows the texts that `unisono.parallel` raises."""

import ast
import functools
import re
from pathlib import Path

import pages
from loops import each

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
STANDS_FOR_MORE = re.compile(r'\.\.\.|"[^"]*"|\b[A-Z]{3,}(?=\b)|\d+')  # ..., a name, MODEL, a number
HOLE = "\0"
LEAST = 12  # shorter pieces of a text are found anywhere


@functools.cache
def texts() -> str:
    """Every string of the packages; an expression within is a hole."""
    found = []
    package = ROOT / "src" / "unisono"
    for path in sorted([*package.glob("parallel/**/*.py"), *package.glob("torch*/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def shown() -> list[str]:
    """The first words of each row."""
    section = PAGE.partition("## Errors of parallel training")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)


def test_the_page_has_the_errors() -> None:
    assert len(shown()) > 50
    assert "parallel-training" in "".join(pages.anchors(PAGE))


@each("first", shown())
def test_the_text_is_raised(first: str) -> None:
    pieces = [piece.strip(" '") for piece in STANDS_FOR_MORE.split(first)]
    known = [piece for piece in pieces if len(piece) >= LEAST]
    assert known, f"{first!r} has no piece to look for"
    missing = [piece for piece in known if piece not in texts()]
    assert not missing, f"{missing} of {first!r} is in no text of unisono.parallel"


def test_what_a_virtual_gpu_refuses_names_a_page_that_is_installed() -> None:
    texts, form = [], r'(?:NotImplementedError|NOT_IMPLEMENTED)\(((?:[^;"]|"(?:[^"\\]|\\.)*")*?)(?:\);|\)\n)'
    for folder in ("src/unisono/virtual", "csrc/virtual"):
        for path in sorted((ROOT / folder).glob("*.[cp]*")):
            texts += [found for found in re.findall(form, path.read_text()) if "virtual GPU" in found]
    assert len(texts) >= 4
    assert not [text for text in texts if "{PAGE}" not in text and "pydoc unisono.virtual" not in text]
