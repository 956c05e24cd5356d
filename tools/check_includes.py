"""Check what the packages of csrc/ include: each only those before it, `virtual` nothing but itself.

check_includes.py [FOLDER]      FOLDER: csrc
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SEPARATE = "virtual"  # its files lie beside each other: they are included without a folder
ORDER = ("kernels", "protocol", "transport", "p2p", "windows", "engine", "calibrate", "simulator", "python")
ALLOWED = {name: ORDER[: number + 1] for number, name in enumerate(ORDER)} | {SEPARATE: ()}
OURS = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def faults(csrc: Path) -> Iterator[str]:
    """What is wrong, a line each. Example: "kernels/sum.cpp includes engine/engine.hpp"."""
    for path in sorted(path for path in csrc.rglob("*") if path.suffix in (".cpp", ".hpp")):
        name, package = path.relative_to(csrc), path.parent.name
        if path.parent.parent != csrc or package not in ALLOWED:
            yield f"{name} is in no package"
            continue
        for included in OURS.findall(path.read_text(encoding="utf-8")):
            if package == SEPARATE and "/" not in included:
                continue
            if included.split("/")[0] not in ALLOWED[package] or not (csrc / included).is_file():
                yield f"{name} includes {included}"


def main(csrc: Path) -> int:
    """Print the faults; return 1 if there are any."""
    found = list(faults(csrc))
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else CSRC))
