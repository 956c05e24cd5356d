"""The memory of `un.empty` in forks, without room, and without its descriptor. Run by test_arrays.py.

`shared_memory_of_arrays.py CASE [ARGUMENT]`: a case is a function.
"""

import os
import resource
import sys
from pathlib import Path

import numpy as np

import unisono as un


def descriptor_is_of_another_file(path: str) -> None:
    x = un.empty(1 << 20, "uint8")
    number = next(int(d.name) for d in Path("/proc/self/fd").iterdir() if "unisono-arrays" in os.readlink(d))
    with open(path, "rb+") as other:
        os.dup2(other.fileno(), number)
    y = un.empty(1 << 20, "uint8")
    x[:] = y[:] = 7


def children_write() -> None:
    x = un.empty(1000)
    x[:] = 1
    for number in (2, 3):
        child = os.fork()
        if child == 0:
            x[500:] = number
            os._exit(0 if x.sum() == 500 + 500 * number else 1)
        assert ended(child) == 0
    assert (x == 1).all()


def child_makes_its_own() -> None:
    mine = un.empty(1000)
    mine[:] = 1
    child = os.fork()
    if child == 0:
        own = un.empty(1000)  # in memory of its own
        own[:] = 2
        del own
        fine = mine.sum() == 1000  # its parent's, which it must not give back
        del mine
        os._exit(0 if fine else 1)
    assert ended(child) == 0
    other = un.empty(1000)
    other[:] = 3
    assert (mine == 1).all()
    assert (other == 3).all()


def file_is_limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # of the file behind them
    array = un.empty((3, 5), np.float32)
    array[:] = 1
    assert array.sum() == 15


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
