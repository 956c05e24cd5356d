"""Memory is lent to and by a process as it was then, not to whatever has its number later."""

from __future__ import annotations

import ranks

# A program that has a megabyte at an address of its own choice, and may become one that has another there.
MEMORY = """
import ctypes, os, sys, time
AT, NBYTES = 0x7E90_0000_0000, 1 << 20
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
assert libc.mmap(AT, NBYTES, 3, 0x100022, -1, 0) == AT  # fixed, private, anonymous
memory = (ctypes.c_ubyte * NBYTES).from_address(AT)

def tell(path):
    open(path, "x").close()

def await_word(path):
    while not os.path.exists(path):
        time.sleep(0.01)
"""

LATER = """
ctypes.memset(AT, 2, NBYTES)
tell(sys.argv[1])
await_word(sys.argv[2])
print("fine")
"""

LENDER = f"""
{MEMORY}
folder = os.environ["MEETING"].removeprefix("file://")
ready, over = folder + ".ready", folder + ".over"
if group.rank == 1:
    ctypes.memset(AT, 1, NBYTES)
    work = group.isend(np.frombuffer(memory, np.uint8), 0)
    os.execv(sys.executable, [sys.executable, "-c", {MEMORY + LATER!r}, ready, over])
await_word(ready)
try:
    got = np.zeros(NBYTES, np.uint8)
    group.recv(got, 1, timeout=1)
    raise SystemExit(f"received what was never sent: {{np.unique(got)}}")
except un.Timeout:
    print("fine")
finally:
    tell(over)
"""


def test_what_another_program_has_there_is_not_received() -> None:
    assert ranks.run(2, LENDER) == ["fine\n"] * 2
