"""The fixture that looks for what a test left behind must find it: each leak is made on purpose here."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import leaks
from effort import HANG_S
from launching import wait_until


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """Leaks here are real: waiting for them to end is in vain."""
    monkeypatch.setattr(leaks, "GRACE_S", 0.05)


def test_the_fixture_is_on_every_test(request):
    missing = [
        item.nodeid for item in request.session.items if "nothing_left_behind" not in item.fixturenames
    ]
    assert not missing
    first = next(iter(request.node.fixturenames))
    assert first == "nothing_left_behind", f"{first} is made before the fixture looks"


def test_nothing_left():
    assert leaks.left_behind(leaks.snapshot()) == []


def test_descriptor():
    before = leaks.snapshot()
    with socket.socket() as left:
        number = left.fileno()
        found = leaks.left_behind(before)
    assert len(found) == 1
    assert found[0].startswith(f"descriptor {number} -> socket:")


def test_descriptor_number_used_again():
    number = os.open("/proc/self/comm", os.O_RDONLY)
    other = os.open("/proc/self/status", os.O_RDONLY)
    before = leaks.snapshot()
    os.dup2(other, number)
    found = leaks.left_behind(before)
    os.close(number)
    os.close(other)
    assert found == [f"descriptor {number} -> /proc/{os.getpid()}/status"]


def test_thread_is_named():
    stop = threading.Event()
    before = leaks.snapshot()
    thread = threading.Thread(target=stop.wait, name="straggler")
    thread.start()
    found = leaks.left_behind(before)
    stop.set()
    thread.join()
    assert [line for line in found if "straggler" in line]


def test_thread_that_ends_within_the_grace_is_none(monkeypatch):
    monkeypatch.setattr(leaks, "GRACE_S", 30.0)
    before = leaks.snapshot()
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()
    assert leaks.left_behind(before) == []
    thread.join()


def test_child_is_named_and_killed():
    before = leaks.snapshot()
    with subprocess.Popen(["sleep", "60"]) as child:
        wait_until(Path(f"/proc/{child.pid}/cmdline").read_bytes)  # empty while the program is being loaded
        found = leaks.left_behind(before)
        assert child.wait(timeout=HANG_S) == -9
    assert found == [f"process {child.pid} (sleep 60)"]


def test_orphaned_grandchild_is_found():
    program = Path(__file__).parent / "programs" / "leaves_a_child.py"
    before = leaks.snapshot()
    output = subprocess.run([sys.executable, str(program)], stdout=subprocess.PIPE, check=True).stdout
    assert leaks.left_behind(before) == [f"process {int(output)} (sleep 60)"]


def test_shared_memory_file():
    path = Path(f"/dev/shm/left-by-test-{os.getpid()}")
    before = leaks.snapshot()
    path.touch()
    try:
        assert str(path) in leaks.left_behind(before)
    finally:
        path.unlink()


@pytest.mark.parametrize("begins", leaks.ANYBODYS_FILES)
def test_shared_memory_that_any_program_may_have_made_is_not_ours(begins: str):
    path = Path(f"/dev/shm/{begins}{os.getpid()}")
    before = leaks.snapshot()
    path.touch()
    try:
        assert leaks.left_behind(before) == []
    finally:
        path.unlink()
