"""One word has one meaning: no type has the name of another type, and words that were given up stay away."""

from __future__ import annotations

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
    "RecvFrom": "two public names for one thing: a message from a rank, in a batch and in a simulation",
    "ReduceOp": "the same thing in both languages: the reduction operations",
    "SendTo": "two public names for one thing: a message to a rank, in a batch and in a simulation",
    "Span": "a public name: a stretch of a simulation's timeline; and one of a pipeline's",
    "Traits": "specialisations of one template",
    "UnexpectedMessage": "the same thing in both languages: a message that no receive matches",
    "Wait": "a public name: a simulated rank waits for a call; and a client of a store waits for a key",
}

# Names of types that say what was done to a thing, or are a metaphor. The nouns are in docs/glossary.md.
GIVEN_UP = """
    Asked Begun Built Called Calling Coded CodedAs Counted Described Done Found Held Hooked Kept
    Known Laid Lent Made Measured Met Noted Opened Passed Pinned Prepared Refused Removed Returned
    Scaled Seen Staged Started Together Told Unavailable Unmeasurable Unusable Waiting Waited Wanted
    Watched Within Still Through Board Canon Card Inbox Kind Lane LaneEntry Lending Loan Meeting
    News Part Piece Pieces Place Remark Side Crossing Flaw Neighbours On OnCpu Origins World
"""
# In the parts that move bytes, also as words.
WORDS = re.compile(r"\b(lends?|lent|lending|lenders?|loans?|lanes?|remark(?:s|ed)?|cards?)\b", re.IGNORECASE)
PAGES = ("docs/design.md", "docs/protocol.md", "docs/adr", "docs/times.md", "docs/glossary.md", "model")
ALLOWED = re.compile(
    r"|business card"  # MPI's word, in the glossary
    r"|lanes;|seen\.lanes"  # of DLPack's dtype
)


def python_types() -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / "src").rglob("*.py")):
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


def test_names_that_were_given_up_stay_away() -> None:
    assert {name: files for name, files in types().items() if name in GIVEN_UP.split()} == {}


def test_words_that_were_given_up_stay_away() -> None:
    files = [*(ROOT / "csrc").rglob("*.?pp"), *(ROOT / "src" / "unisono" / "engine").rglob("*.py")]
    files += (ROOT / "src" / "unisono" / "plans").rglob("*.py")
    for page in PAGES:
        files += (
            [ROOT / page] if (ROOT / page).is_file() else [f for f in (ROOT / page).rglob("*") if f.is_file()]
        )
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if WORDS.search(ALLOWED.sub("", line))
    ]
    assert found == []


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
