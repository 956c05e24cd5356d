"""`abort`: how this process ends the whole job."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

worlds: list[Any] = []
"""Those that this process is in, its own first."""


def abort(errorcode: int) -> NoReturn:
    """End the job with an exit status."""
    sys.stdout.flush()
    sys.stderr.flush()
    for world in worlds:
        world.group.abort()
    os._exit(errorcode & 0xFF or 1)
