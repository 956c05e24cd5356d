"""`shares_arrays.py WHAT`: collectives on arrays of `un.empty`; it prints how many arenas are mapped then."""

import os
import resource
import sys
from pathlib import Path

import numpy as np

import inside
import unisono as un


def print_mapped(word: str) -> None:
    """Count arenas: each is as long as the machine has memory, in pieces that may be touched or not."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "unisono-arrays" in line:
            first, last = line.split()[0].split("-")
            found += int(last, 16) - int(first, 16)
    print(word, found // (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))


class Arrays:
    """Two arrays of `un.empty`, and what they are used for."""

    def __init__(self) -> None:
        self.x = un.empty(100_000, np.float32)
        self.out = un.empty(group.size * 100_000, np.float32)

    def check(self) -> None:
        self.x[:] = group.rank + 1
        group.all_gather(self.out, self.x)
        assert (self.out.reshape(group.size, -1) == np.arange(1, group.size + 1)[:, None]).all()
        group.all_reduce(self.x)
        assert (self.x == sum(range(1, group.size + 1))).all()


def maps() -> None:
    arrays = Arrays()
    arrays.check()
    print_mapped("mapped")
    assert inside.engine(group).mapped_messages >= 4
    group.close()
    print_mapped("then")


def cannot_on_rank_1() -> None:
    if group.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # of the file behind it
    arrays = Arrays()
    arrays.check()
    arrays.check()
    print_mapped("mapped")


def closes_descriptors() -> None:
    arrays = Arrays()
    for number in range(3, 200):
        try:
            if "unisono-arrays" in os.readlink(f"/proc/self/fd/{number}"):
                os.dup2(os.memfd_create("unisono-arrays"), number)
        except OSError:
            pass
    arrays.check()
    print_mapped("mapped")


def forks() -> None:
    arrays = Arrays()
    arrays.check()
    if group.rank == 0:
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            print("fine", flush=True)
            os._exit(0)
    rank, again = group.rank, os.environ["MEETING"] + "-again"
    with un.init_process_group(init_method=again, rank=rank, world_size=2, timeout=60) as second:
        y, all_y = un.empty(100_000, np.float32), un.empty(200_000, np.float32)
        y[:] = rank
        second.all_gather(all_y, y)
        assert (all_y.reshape(2, -1) == np.arange(2)[:, None]).all()
        assert inside.engine(second).mapped_messages > 0
    os._exit(0)


def sends_without_copy() -> None:
    """Its array lies in shared memory on the ranks that are named behind "sends_without_copy"."""
    make = un.empty if str(group.rank) in sys.argv[2:] else np.empty
    x = make(1_000_000, np.float32)
    for turn in range(5):
        for source in (0, 1):
            x[:] = group.rank + turn
            group.broadcast(x, source)
            assert (x == source + turn).all()
            x[:] = group.rank - turn
            if group.rank == source:
                group.send(x, 1 - source)
            else:
                group.recv(x, source)
            assert (x == source - turn).all()


WHAT = (maps, cannot_on_rank_1, closes_descriptors, forks, sends_without_copy)

if __name__ == "__main__":
    group = un.init_process_group(init_method=os.environ["MEETING"])
    {each.__name__: each for each in WHAT}[sys.argv[1]]()
