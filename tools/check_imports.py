"""No file of src/unisono imports itself in a circle. import-linter checks the order of the rooms.

Imports for type checkers count, too: who reads a type has to know its file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import grimp

# Pairs of one concept: the first imports the second for the type of an argument only.
ALLOWED = (
    ("unisono.engine.group.coalesced", "unisono.engine.group.planning"),
    ("unisono.engine.group.external_work", "unisono.engine.group.external"),
)


def circle(imported: Mapping[str, set[str]]) -> list[str]:
    """A circle of files, the first one also at its end; empty if there is none."""
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def main() -> int:
    """Print a circle, if there is one."""
    graph = grimp.build_graph("unisono", cache_dir=".import_linter_cache")
    files = graph.modules - {"unisono"}  # the public names: of the files below, none of which needs it
    imported = {file: graph.find_modules_directly_imported_by(file) & files for file in files}
    for one, other in ALLOWED:
        if other not in imported.get(one, ()):
            print(f"tools/check_imports.py allows {one} -> {other}, which is not there")
            return 1
        imported[one].remove(other)
    if found := circle(imported):
        print(f"a circle of imports: {' -> '.join(found)}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
