"""`meets_limits.py WHERE ARGUMENT`: lowers a limit of the process, and prints the error that it leads to."""

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import unisono as un


def lower(name: int, soft: int) -> None:
    resource.setrlimit(name, (soft, resource.getrlimit(name)[1]))


def allow_more_files(more: str) -> None:
    used = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    lower(resource.RLIMIT_NOFILE, used + int(more))


def meet() -> un.Group:
    return un.init_process_group(init_method=os.environ["MEETING"])


def expect(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        print(type(error).__name__, error)
    else:
        print("nothing raised")


def files_of_a_subgroup(more: str) -> None:
    world = meet()
    if world.rank == 1:
        allow_more_files(more)
    try:
        with world.subgroup([0, 1]):
            print("made")
    except un.UnisonoError as error:
        print(type(error).__name__, error)
    world.close()


def files_of_a_store(more: str) -> None:
    make = un.TCPStore  # Python itself needs a descriptor to find it
    allow_more_files(more)
    try:
        with make("127.0.0.1", 0, is_server=True, timeout_s=300, linger_s=0) as store:
            store.set("k", b"v")
        print("made")
    except un.StoreError as error:
        print(error)


def files_of_a_meeting(port: str) -> None:
    """The rank that serves the store has no descriptors for all others."""
    make, rank = un.init_process_group, int(os.environ["RANK"])
    if rank == 0:
        allow_more_files("9")
    expect(un.UnisonoError, lambda: make(init_method=f"tcp://127.0.0.1:{port}", timeout=30))


def memory_of_a_group(staging: str) -> None:
    os.environ["UNISONO_STAGING_BYTES"] = staging
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    lower(resource.RLIMIT_AS, used + (100 << 20))
    expect(un.RendezvousError, meet)


def thread_of_a_message(_: str) -> None:
    """What could not begin was not posted: the next message takes its place."""
    group, x = meet(), np.zeros(1 << 20)
    if group.rank == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        lower(resource.RLIMIT_AS, used + (1 << 20))
        expect(un.UnisonoError, lambda: group.isend(x, 1))
        expect(un.UnisonoError, lambda: group.irecv(x, 1))
        lower(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)[1])
        x += 1
        group.isend(x, 1).wait()
    else:
        group.recv(x, 0)
        print(x.min())
    group.barrier()
    group.close()


def size_of_a_file(path: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with un.FileStore(path, linger_s=0) as store:
        lower(resource.RLIMIT_FSIZE, 4096)
        expect(un.StoreError, lambda: store.set("k", bytes(8192)))
        lower(resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        store.set("k", b"v")
        print(store.get("k").decode())


WHERE = (
    files_of_a_subgroup, files_of_a_store, files_of_a_meeting, memory_of_a_group, thread_of_a_message,
    size_of_a_file,
)  # fmt: skip

if __name__ == "__main__":
    {each.__name__: each for each in WHERE}[sys.argv[1]](sys.argv[2])
