"""Runs a program as ranks on the hosts of a test (support/hosts.py): forks that enter the host's namespaces.

The module of a job of `suite.Forks`; its arguments: PLACES PROGRAM [ARGUMENT ...]. PLACES is JSON, for each
rank a process of its host (null: the ranks' own host), and the rank's environment.
"""

import ctypes
import json
import os
import runpy
import sys
from pathlib import Path

NAMESPACES = ("net", "uts", "ipc", "mnt")


def main(rank: int, size: int, folder: Path, places: str, program: str, *arguments: str) -> None:
    pid, environ = json.loads(places)[rank]
    if pid is not None:
        enter(pid)
    os.environ.update(environ)
    sys.argv = [program, *arguments]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def enter(pid: int) -> None:
    """Enter the namespaces of a process, as nsenter does."""
    libc, here = ctypes.CDLL(None, use_errno=True), Path.cwd()
    for name in NAMESPACES:
        with Path(f"/proc/{pid}/ns/{name}").open() as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns to {name} of process {pid}")
    os.chdir(here)
