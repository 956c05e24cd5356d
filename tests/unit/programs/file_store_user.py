"""A process that uses a file store. Run by test_store_file.py.

`file_store_user.py CASE PATH [ARGUMENT]`: a case is a function.
"""

import os
import resource
import sys
import time

import inside
from unisono.engine.store import FileStore
from unisono.errors import StoreError


def hold(path: str) -> None:
    """Set a value, then wait to be killed."""
    store = opened(path)
    print("open", flush=True)
    time.sleep(3600)
    store.close()


def hold_and_fork(path: str) -> None:
    """The same, with a child that lives on."""
    store = opened(path)
    up, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(tell, b"1")
        time.sleep(3600)
    os.read(up, 1)  # it has begun, and let go of the store
    print(pid, flush=True)
    print("open", flush=True)
    time.sleep(3600)
    store.close()


def opened(path: str) -> FileStore:
    store = FileStore(path, 2)
    store.set("old", "value")
    return store


def meet(path: str, rank: str) -> None:
    """One of four ranks, which find nothing old."""
    with FileStore(path, 4, timeout_s=300) as store:
        assert not store.check(["old"])
        store.add("came", 1)
        store.set(rank, "here")
        store.wait([str(number) for number in range(4)])
        print(int(store["came"]), flush=True)


def write_on(path: str, key: str) -> None:
    """Write values of one byte each, of many lengths, until killed."""
    store = FileStore(path)
    print("open", flush=True)
    number = 0
    while True:
        number += 1
        store.set(key, bytes([number % 251]) * (1 + number * 7919 % 300_000))
        store.add("writes", 1)


def open_and_close(path: str) -> None:
    for _ in range(60):
        with FileStore(path, timeout_s=300) as store:
            store.add("n", 1)
            assert int(store["n"]) >= 1
    print("fine")


def lock(path: str) -> None:
    """Keep the file locked."""
    store = FileStore(path)
    with inside.log(store).locked(time.monotonic() + 5, writing=True):
        print("locked", flush=True)
        time.sleep(3600)


def fill_the_disk(path: str) -> None:
    """Write more than fits; what was there stays, and less fits again."""
    store = FileStore(path)
    store.set("k", "before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        store.set("k", b"x" * 200_000)
    except StoreError as error:
        print(error)
    print(store["k"], flush=True)
    store.set("k", "after")
    print(store["k"], flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
