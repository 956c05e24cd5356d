"""Python's tracker of shared memory takes a second longer to remove each one."""

import sys

if "resource_tracker" in " ".join(sys.orig_argv):
    import _posixshmem
    import time

    unlink = _posixshmem.shm_unlink

    def unlink_late(name: str) -> None:
        time.sleep(1.0)
        unlink(name)

    _posixshmem.shm_unlink = unlink_late
