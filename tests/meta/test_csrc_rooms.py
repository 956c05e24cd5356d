"""The rooms of `csrc/`: each includes only those before it, and only `python` knows Python."""

from __future__ import annotations

import re
from pathlib import Path

from loops import each

CSRC = Path(__file__).resolve().parents[2] / "csrc"
ROOMS = ("kernels", "protocol", "transport", "p2p", "engine", "calibrate", "python")
OURS = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def test_every_file_lies_in_a_room() -> None:
    assert not [path.name for path in CSRC.iterdir() if path.is_file()]
    assert set(ROOMS) <= {path.name for path in CSRC.iterdir()}


@each("room", ROOMS)
def test_a_room_includes_only_those_before_it(room: str) -> None:
    allowed = ROOMS[: ROOMS.index(room) + 1]
    files = [path for path in (CSRC / room).iterdir() if path.suffix in (".cpp", ".hpp")]
    assert files
    for path in files:
        for included in OURS.findall(path.read_text(encoding="utf-8")):
            assert (CSRC / included).is_file(), f"{path.name} includes {included}, which is not in csrc"
            assert included.split("/")[0] in allowed, f"{room}/{path.name} includes {included}"
