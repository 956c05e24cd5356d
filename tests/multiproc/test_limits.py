"""Limits of the process: each error says which one was met, and how to raise it."""

from __future__ import annotations

from pathlib import Path

import pytest

import ranks

START = """
import os, resource, sys
import numpy as np
import unisono as un

def lower(name, soft):
    resource.setrlimit(name, (soft, resource.getrlimit(name)[1]))

def used():
    return max(int(fd) for fd in os.listdir("/proc/self/fd"))

def group():
    return un.init_process_group(init_method=os.environ["MEETING"], timeout=20)

def expect(kind, call):
    try:
        call()
    except kind as error:
        print(type(error).__name__, error)
    else:
        print("nothing raised")
"""


def told(tmp_path: Path, size: int, program: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(START + program)
    return ranks.processes(size, path)


FILES = r"too many open files \(the limit RLIMIT_NOFILE is \d+"
RAISE = "Raise it before the start: `ulimit -n "


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize("more", [1, 6, 11])
def test_descriptors_run_out_while_a_group_is_made(tmp_path: Path, more: int) -> None:
    program = f"""
world = group()
if world.rank == 1:
    lower(resource.RLIMIT_NOFILE, used() + {more})
try:
    with world.subgroup([0, 1]) as pair:
        print("made")
except un.UnisonoError as error:
    print(type(error).__name__, error)
world.close()
"""
    both = told(tmp_path, 2, program)
    if "made" in both[1]:
        return
    for text in both:
        assert text.startswith("RendezvousError"), text
        assert "RLIMIT_NOFILE" in text, text
        assert RAISE in text, text
        assert "firewalls" not in text, text


@pytest.mark.parametrize("more", [0, 2, 5])
def test_descriptors_run_out_in_a_store(tmp_path: Path, more: int) -> None:
    program = f"""
un.TCPStore  # Python itself needs a descriptor to find it
lower(resource.RLIMIT_NOFILE, used() + {more})
try:
    with un.TCPStore("127.0.0.1", 0, is_server=True, timeout_s=5, linger_s=0) as store:
        store.set("k", b"v")
    print("made")
except un.StoreError as error:
    print(error)
"""
    [text] = told(tmp_path, 1, program)
    assert text == "made\n" or ("RLIMIT_NOFILE" in text and RAISE in text), text


def test_no_memory_for_a_group(tmp_path: Path) -> None:
    program = """
os.environ["UNISONO_STAGING_BYTES"] = "256M"
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
lower(resource.RLIMIT_AS, used + (100 << 20))
expect(un.RendezvousError, group)
"""
    texts = told(tmp_path, 2, program)
    first = [text for text in texts if "the limit RLIMIT_AS is" in text]
    assert first and all("`ulimit -v " in text for text in first), texts
    assert all("ended while the group was being made" in text for text in texts if text not in first), texts


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    program = """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with un.FileStore("meeting", linger_s=0) as store:
    lower(resource.RLIMIT_FSIZE, 4096)
    expect(un.StoreError, lambda: store.set("k", bytes(8192)))
    lower(resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    store.set("k", b"v")
    print(store.get("k").decode())
"""
    [text] = told(tmp_path, 1, program.replace('"meeting"', repr(str(tmp_path / "store"))))
    assert "cannot write to the store's file" in text
    assert "the limit RLIMIT_FSIZE is 4096" in text
    assert text.endswith("v\n"), "what was half written is written over"


def test_a_full_disk(tmp_path: Path) -> None:
    program = """
from unisono.limits import described
import errno
print(described(OSError(errno.ENOSPC, "No space left on device", "/dev/full")))
"""
    [text] = told(tmp_path, 1, program)
    assert text.startswith("no space left on device: '/dev/full'. Free some space there")
