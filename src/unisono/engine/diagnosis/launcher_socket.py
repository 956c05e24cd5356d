"""The socket on which a rank sends records to its launcher, see docs/launcher.md."""

from __future__ import annotations

import os
import socket
import stat

HAND_OVER_S = 2.0  # for a slow launcher


def send(fd: int, inode: int, record: bytes) -> bool:
    """Send one record. False: the socket was closed, and another file may have its number.

    Raises:
        OSError: the launcher has ended, or takes nothing in time.
    """
    status = os.fstat(fd)
    if not stat.S_ISSOCK(status.st_mode) or status.st_ino != inode:
        return False
    with socket.socket(fileno=os.dup(fd)) as launcher:
        launcher.settimeout(HAND_OVER_S)
        launcher.send(record)
    return True
