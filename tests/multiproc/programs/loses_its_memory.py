"""Buffers that cannot be used: every rank is told at once, whose it is. argv: the cases."""

import os
import sys
import tempfile
import time
from typing import Any

import numpy as np

import unisono as un
from sandbox import refuse

NBYTES = 8_000_000


def mapped(nbytes: int) -> tuple[Any, Any]:
    """A mapped file, whole."""
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115  (until the program ends)
    os.truncate(file.name, nbytes)
    return file, np.memmap(file.name, np.uint8, "r+")


def run(group: un.Group, call: str, x: Any, owner: int) -> Any:
    """The call, in which the owner's buffer is read or written."""
    used, kind, _ = call.split()
    if kind == "all_reduce":
        return group.all_reduce(x)
    if kind == "broadcast":
        return group.broadcast(x, owner if used == "read" else 1 - owner)
    sends = (group.rank == owner) == (used == "read")
    return group.send(x, 1 - group.rank) if sends else group.recv(x, 1 - group.rank)


def memory(number: int, call: str) -> str:
    """One case with a file that is cut."""
    owner, nbytes = number % 2, int(call.split()[2])
    with un.init_process_group(init_method=f"{os.environ['MEETING']}.{number}", timeout=60) as group:
        file, x = mapped(nbytes) if group.rank == owner else (None, np.ones(nbytes, np.uint8))
        group.barrier()
        if file:
            os.truncate(file.name, 4096)
        began = time.monotonic()
        try:
            run(group, call, x, owner)  # over connections what was sent may be on its way
            group.barrier()
        except un.GroupError as error:
            text = str(error)
            past = "read" if call.startswith("read") else "written"
            named = f"the buffer of rank {owner} " in text and f"cannot be {past}" in text
            return "" if named and time.monotonic() - began < 10 else f"{call}: {text}"
    return f"{call} returned"


def sandbox(number: int, what: str) -> str:
    """Rank 0 may no longer copy in one direction: right where the other end can do it, else refused."""
    with un.init_process_group(init_method=f"{os.environ['MEETING']}.{number}", timeout=60) as group:
        if group.rank == 0:
            refuse(what)
        group.barrier()
        try:
            for source in (1, 0):
                x = np.full(NBYTES, group.rank, np.uint8)
                group.broadcast(x, source)
                assert (x == source).all()
                peer = 1 - group.rank
                group.send(x, peer) if group.rank == source else group.recv(x, peer)
        except un.GroupError as error:
            named = "the system refuses rank 0 to copy from the memory of rank 1" in str(error)
            return "" if named and what == "read" else str(error)
    return "" if what == "write" else "returned"


told = [
    sandbox(number, case.split()[1]) if case.startswith("refused") else memory(number, case)
    for number, case in enumerate(sys.argv[1:])
]
print("\n".join(filter(None, told)) or "fine")
