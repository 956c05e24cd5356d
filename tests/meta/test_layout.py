"""What ranks read of each other changes only with its number, by which other builds are told apart."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from unisono import _native

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SHARED = {
    "region.hpp": ("enum", "struct", "constexpr"),  # the memory of one host, and its parts
    "loan.hpp": ("struct",),
    "world.hpp": ("struct",),  # told between hosts
    "control.hpp": ("struct Frame",),
    "tcp.hpp": ("struct Header",),
    "channels.hpp": ("struct Header",),
}
KNOWN = (8, "d64dd8fcf557")


def declarations(text: str, kinds: tuple[str, ...]) -> list[str]:
    """Structs, enums and constants without comments; where a line ends does not matter."""
    text = re.sub(r"//[^\n]*", "", text)
    found = []
    for kind in kinds:
        pattern = rf"^[ ]*{kind}\b[^;{{}}]*(?:=[^;]*;|\{{.*?^[ ]*\}}(?: \w+)?;|\{{[^\n]*\}};)"
        found += re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    return [re.sub(r"\s+", " ", each) for each in found]


def digest() -> str:
    texts = [
        each for name, kinds in SHARED.items() for each in declarations((CSRC / name).read_text(), kinds)
    ]
    assert len(texts) > 20, texts
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def test_the_layout_has_the_number_it_was_given() -> None:
    """After a change of what is shared: raise kLayout, and put both into KNOWN as this shows them."""
    assert (_native.LAYOUT, digest()) == KNOWN
