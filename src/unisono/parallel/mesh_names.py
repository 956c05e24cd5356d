"""Names for the axes of a DeviceMesh that no other mesh of this process has.

DTensor remembers what it has done on a mesh, and takes meshes of equal ranks and equal names for one mesh.
It would then use the process groups of the first one, which may be destroyed. Names of groups come again
after `destroy_process_group`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

__all__ = ["unique_names"]

_numbers = itertools.count()


def unique_names(axes: Iterable[str]) -> tuple[str, ...]:
    """Names of the axes of a new mesh. Example: ("data",) -> ("data of mesh 3",)."""
    number = next(_numbers)
    return tuple(f"{axis} of mesh {number}" for axis in axes)
