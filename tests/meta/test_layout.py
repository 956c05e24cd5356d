"""What the engines of ranks read of each other changes only with its number, by which other builds are told
apart: where it lies, what its numbers mean, and what both ends of a message work out for themselves.

How a buffer is cut into messages is not among it: sizes are compared when a message comes.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from unisono import _native

CSRC = Path(__file__).resolve().parents[2] / "csrc"
PARTS = ("RankCell& cell", "Lane& lane", "Channel& channel", r"unsigned char\* (?:staging|channel_bytes)")
NUMBERS = ("constexpr uint64_t", "constexpr uint32_t", "constexpr size_t")
SHARED = {
    "region.hpp": ("enum", "struct", "constexpr", *PARTS),  # the memory of one host, and its parts
    "region.cpp": ("struct Layout",),
    "loan.hpp": ("struct Identity", "struct Loan"),
    "loan.cpp": (*NUMBERS, "uint32_t units"),
    "engine.cpp": ("uint64_t Engine::fingerprint",),
    "world.hpp": ("struct Standing",),  # told between hosts
    "control.hpp": ("enum", "struct Frame"),
    "tcp.hpp": ("struct Header",),
    "channels.hpp": ("struct Header",),
    "channels.cpp": ("constexpr",),
}
KNOWN = (10, "3051ae3b9a60")


def declarations(text: str, kinds: tuple[str, ...]) -> list[str]:
    """Structs, enums, constants and functions without comments; where a line ends does not matter."""
    text = re.sub(r"//[^\n]*", "", text)
    found = []
    for kind in kinds:
        value, line, block = r"[^;{}=]*=[^;]*;", r"\{[^\n]*\}(?: \w+)?;?$", r"\{.*?^\1\}(?: \w+)?;?$"
        pattern = rf"^([ ]*)({kind}\b(?:{value}|[^;{{}}]*(?:{line}|{block})))"
        these = [match[2] for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL)]
        assert these, f"there is no {kind} any more"
        found += these
    return [re.sub(r"\s+", " ", each) for each in found]


def digest() -> str:
    texts = re.findall(r"^#define.*?[^\\]$", (CSRC / "dtype.hpp").read_text(), re.MULTILINE | re.DOTALL)
    for name, kinds in SHARED.items():
        texts += declarations((CSRC / name).read_text(), kinds)
    assert len(texts) > 40, texts
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def test_the_layout_has_the_number_it_was_given() -> None:
    """After a change of what is shared: raise kLayout, and put both into KNOWN as this shows them."""
    assert (_native.LAYOUT, digest()) == KNOWN
