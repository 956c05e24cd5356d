"""One word has one meaning: no type has the name of another type, and the glossary's types exist."""

import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPP = re.compile(
    r"^\s*(?:template <.*>\s*)?(?:class|struct|union|enum class|enum)\s+(?:alignas\([^)]*\)\s*)?"
    r"(\w+)(?:<[^>]*>)?(?:\s+final)?(?:\s*:[^:].*)?\s*\{",
    re.MULTILINE,
)

PYTHON = re.compile(r"^\s*class _*(\w+)[(:]", re.MULTILINE)

# Names that several types have, and why.
SHARED = {
    "BufferView": "the same thing in both languages: address, elements and dtype of a buffer",
    "CallResult": "the same thing in both languages: what a call returns",
    "CoalescedBuffers": "the same thing in both languages: the buffers of a coalesced call",
    "EdgeCoding": "the same thing in both languages: how the edges of a call encode values",
    "Plan": "two public names: the steps of a collective, and the parallelism of a training run",
    "ProcessGroupUnisono": "the process group for PyTorch, and its wrapper for torchft",
    "Program": "a public name: what the ranks of a simulation do; and the engine's steps of a plan",
    "Queue": "a public name: one writer and many readers; and what waits in a simulation",
    "RecvFrom": "two public names for one thing: a message from a rank, in a batch and in a simulation",
    "ReduceOp": "the same thing in both languages: the reduction operations",
    "SendTo": "two public names for one thing: a message to a rank, in a batch and in a simulation",
    "Span": "a public name: a stretch of a simulation's timeline; and one of a pipeline's",
    "Traits": "specialisations of one template",
    "UnexpectedMessage": "the same thing in both languages: a message that no receive matches",
    "Window": "the same thing in both languages: memory that ranks read and write",
    "Wait": "a public name: a simulated rank waits for a call; and a client of a store waits for a key",
}


GIVEN = ("mpi", "mpi4py")
"""Packages whose names are those of MPI and mpi4py."""


def python_types() -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / "src").rglob("*.py")):
        if file.relative_to(ROOT / "src" / "unisono").parts[0] in GIVEN:
            continue
        for name in PYTHON.findall(file.read_text()):
            yield name, str(file.relative_to(ROOT))


def cpp_types() -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / "csrc").rglob("*.?pp")):
        for name in CPP.findall(file.read_text()):
            yield name, str(file.relative_to(ROOT))


@functools.cache
def types() -> dict[str, list[str]]:
    """The files of every type, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, file in (*python_types(), *cpp_types()):
        found[name].append(file)
    return found


def test_types_of_both_languages_are_found() -> None:
    found = types()
    assert len(found) > 500
    assert found["Fifo"] == ["csrc/protocol/region.hpp"]
    assert found["PeerInfo"] == ["src/unisono/engine/bootstrap/peer_info.py"]


def test_no_two_types_have_one_name() -> None:
    several = {name: files for name, files in types().items() if len(files) > 1}
    assert {name: files for name, files in several.items() if name not in SHARED} == {}
    assert [name for name in SHARED if name not in several] == []  # a reason for nothing


def test_every_type_of_the_glossary_exists() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    found = types()
    theirs = {"Work", "Store", "TCPStore"}
    for row in page.splitlines():
        if row.startswith("| **"):
            first = row.split("|")[1]
            names = re.findall(r"`(?:up\.|plans\.)?([A-Z]\w+)`", first)
            assert [name for name in names if name not in found and name not in theirs] == []
            place = row.rstrip("| ").rsplit("|", 1)[1]
            for path in re.findall(r"`([\w/.]+)`", place):
                assert (ROOT / path).exists() or (ROOT / "src" / "unisono" / path).exists(), path
