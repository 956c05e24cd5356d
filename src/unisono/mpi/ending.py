"""`abort`: how this process ends the whole job."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

worlds: list[Any] = []
"""The group of all ranks, while there is one."""


def abort(errorcode: int) -> NoReturn:
    """End the job with an exit status."""
    sys.stdout.flush()
    sys.stderr.flush()
    for group in worlds:
        group.abort()
    os._exit(errorcode & 0xFF or 1)
