"""Two ranks claim 160 of the 256 MiB of GPU 0 at one moment, again and again. Prints who had them.

Arguments: a file through which the ranks meet; the number of times.
"""

import mmap
import os
import struct
import sys
import time

import torch

RANK, PATH, TIMES = int(os.environ["LOCAL_RANK"]), sys.argv[1], int(sys.argv[2])
PLACES = 8  # bytes of a number


def board() -> mmap.mmap:
    """Memory that both have."""
    descriptor = os.open(PATH, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, 6 * PLACES)
    return mmap.mmap(descriptor, 6 * PLACES)


def meet(memory: mmap.mmap, number: int, place: int) -> None:
    """Spin until the other one has this number, too."""
    mine, other = ((2 * place + rank) * PLACES for rank in (RANK, 1 - RANK))
    memory[mine : mine + PLACES] = struct.pack("q", number)
    late = time.monotonic() + 30
    while struct.unpack("q", memory[other : other + PLACES])[0] < number:
        os.sched_yield()
        assert time.monotonic() < late, "the other rank does not come"


torch.cuda.set_device(0)
shared, had = board(), ""
for number in range(1, TIMES + 1):
    meet(shared, number, 0)
    try:
        x = torch.empty(40 << 20, device="cuda")
    except torch.OutOfMemoryError:
        x = None
    had += "01"[x is not None]
    meet(shared, number, 1)
    del x
    torch.cuda.empty_cache()
    meet(shared, number, 2)
print(f"had: {had}")
