"""Builds whose ranks would read each other's memory or frames differently have different numbers.

That ranks with different numbers are told so is tested in multiproc/test_connections.py.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from effort import HANG_S
from unisono import _native

CSRC = Path(__file__).resolve().parents[2] / "csrc"
PROGRAM = """
#include <cstdio>
#include "protocol/region_layout.hpp"
int main() { std::printf("%u", unisono::kLayout); }
"""
# What somebody may change: file, what stands there, what stands there then.
CHANGES = {
    "nothing": ("protocol/region.hpp", "", ""),
    "two fields change places": (
        "protocol/region.hpp",
        "std::atomic<uint32_t> epoch;\n  std::atomic<uint32_t> sleepers;",
        "std::atomic<uint32_t> sleepers;\n  std::atomic<uint32_t> epoch;",
    ),
    "an enum has one more value": (
        "protocol/region.hpp",
        "{ kStaged, kZeroCopy",
        "{ kStaged, kNew, kZeroCopy",
    ),
    "an element type is another one": ("kernels/dtype.hpp", '"int16", 2', '"uint16", 2'),
    "a codec is put before another one": (
        "kernels/codec.hpp",
        "X(kFP16, ",
        'X(kNew, "new", 16, false) X(kFP16, ',
    ),
    "a codec's blocks are scaled": ("kernels/codec.hpp", '"1-6-9", 16, false', '"1-6-9", 16, true'),
    "a zero-copy transfer is cut otherwise": ("protocol/zero_copy.hpp", "kMostUnits = 16", "kMostUnits = 32"),
}


def layout_after(change: tuple[str, str, str], folder: Path) -> int:
    """The number of a build with that change."""
    name, before, after = change
    shutil.copytree(CSRC, folder / "csrc")
    text = (folder / "csrc" / name).read_text()
    assert before in text, f"{name} has no {before!r} any more"
    (folder / "csrc" / name).write_text(text.replace(before, after, 1))
    (folder / "program.cpp").write_text(PROGRAM)
    subprocess.run(
        ["g++", "-std=c++20", "-Icsrc", "program.cpp", "-o", "program"],
        cwd=folder,
        timeout=HANG_S,
        check=True,
    )
    return int(subprocess.run(folder / "program", capture_output=True, timeout=HANG_S, check=True).stdout)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_is_shared_is_another_layout(name: str, tmp_path: Path) -> None:
    assert (layout_after(CHANGES[name], tmp_path) == _native.LAYOUT) == (name == "nothing")
