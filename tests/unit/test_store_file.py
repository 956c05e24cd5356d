"""The file store among killed writers, stale files and files that are none of its own."""

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import inside
from effort import HANG_S, judge_time
from loops import each
from unisono.engine.store import FileStore
from unisono.engine.store.log import HEADER, MAGIC
from unisono.errors import StoreError, StoreTimeout

PROGRAM = Path(__file__).parent / "programs" / "file_store_user.py"


def process(case: str, *arguments: object) -> subprocess.Popen[str]:
    """The program in a case, its output in a pipe."""
    command = [sys.executable, str(PROGRAM), case, *map(str, arguments)]
    environ = {**os.environ, "PYTHONPATH": os.path.dirname(inside.__file__)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    with child:  # closes the pipe and waits, without reading: an orphan may still hold its other end
        pass


def test_the_file_is_deleted_by_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "store"
    one, two = FileStore(path, 2), FileStore(path, 2)
    one.set("k", "v")
    one.close()
    assert path.exists()
    assert two.get("k") == b"v"
    two.close()
    assert not path.exists()


def test_the_file_of_a_killed_run_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "store"
    child = process("hold", path)
    assert line(child) == "open"
    with FileStore(path, 2) as store:
        assert store.get("old") == b"value"  # the run goes on: it is joined
        end(child)
        assert store.get("old") == b"value"
        store.close()
    assert not path.exists()
    child = process("hold", path)
    assert line(child) == "open"
    end(child)
    assert path.stat().st_size > 0
    with FileStore(path, 2, linger_s=0) as store:
        assert len(store) == 0


def test_of_two_who_leave_at_once_one_deletes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    one, two = FileStore(path, 2), FileStore(path, 2)
    close = inside.log(one).close

    def close_late() -> None:
        two.close()
        close()

    inside.log(one).close = close_late
    one.close()
    assert not path.exists()


def test_a_run_started_while_the_file_is_stale_comes_together(tmp_path: Path) -> None:
    path = tmp_path / "store"
    child = process("hold", path)
    assert line(child) == "open"
    end(child)
    ranks = [process("meet", path, rank) for rank in range(4)]
    assert [rank.communicate()[0].strip() for rank in ranks] == ["4"] * 4
    assert not path.exists()


def test_an_orphan_does_not_keep_the_run_alive(tmp_path: Path) -> None:
    path = tmp_path / "store"
    child = process("hold_and_fork", path)
    orphan = int(line(child))
    try:
        assert line(child) == "open"
        end(child)
        with FileStore(path, linger_s=0) as store:
            assert len(store) == 0
    finally:
        os.kill(orphan, signal.SIGKILL)


@each("content", [b"", MAGIC[:7], MAGIC, MAGIC + b"\x00\x00\x00\x09torn", MAGIC + b"\xff" * 99])
def test_an_empty_torn_or_damaged_file_of_ours_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store"
    path.write_bytes(content)
    with FileStore(path) as store:
        assert len(store) == 0
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_bytes(b"four years of work")
    with pytest.raises(StoreError, match="no Unisono store file.*four years of work.*path of its own"):
        FileStore(path)
    assert path.read_bytes() == b"four years of work"


def test_unusable_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="missing/store': No such file"):
        FileStore(tmp_path / "missing" / "store")
    with pytest.raises(StoreError, match="Is a directory"):
        FileStore(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(StoreError, match="link"):
        FileStore(tmp_path / "link")
    assert not (tmp_path / "target").exists()


def test_a_value_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as one, FileStore(path) as two:
        for number in range(20):
            one.set("k", bytes([number]) * (1000 + 10 * number))
            assert two.get("k") == bytes([number]) * (1000 + 10 * number)
        assert path.stat().st_size < 5000


def test_writers_killed_at_random_moments_leave_whole_values(tmp_path: Path) -> None:
    path = tmp_path / "store"
    chance = random.Random(7)
    with FileStore(path, timeout_s=HANG_S) as store:
        for turn in range(5):
            children = [process("write_on", path, f"{turn}-{number}") for number in range(2)]
            for child in children:
                assert line(child) == "open"
            time.sleep(chance.uniform(0.0, 0.06))
            for child in children:
                end(child)
            for number in range(2):
                value = store.peek(f"{turn}-{number}") or b"x"
                assert len(set(value)) == 1
            before = int(store.peek("writes") or b"0")
            assert store.add("writes", 1) == before + 1
        with FileStore(path) as other:
            assert len(other) == len(store)
            assert other["writes"] == store["writes"]


def test_opening_and_closing_in_many_processes_never_fails(tmp_path: Path) -> None:
    children = [process("open_and_close", tmp_path / "store") for _ in range(4)]
    assert [child.communicate()[0].strip() for child in children] == ["fine"] * 4
    assert not (tmp_path / "store").exists()


def test_the_first_to_close_waits_for_those_to_come(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(path, 2, linger_s=HANG_S)
    store.set("k", "v")
    closing = threading.Thread(target=store.close)
    closing.start()
    time.sleep(0.1)
    with FileStore(path, 2) as late:
        assert late.get("k") == b"v"
        closing.join(HANG_S)
        assert not closing.is_alive()
    assert not path.exists()


def test_close_waits_no_longer_than_told(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", 2, linger_s=0.1)
    start = time.monotonic()
    store.close()
    judge_time(time.monotonic() - start, 3)


def test_a_file_deleted_while_in_use_is_told(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path, 2) as store:
        threading.Timer(0.1, path.unlink).start()
        start = time.monotonic()
        with pytest.raises(StoreError, match="deleted while in use") as caught:
            store.get("never", timeout_s=HANG_S)
        assert not isinstance(caught.value, StoreTimeout)
        judge_time(time.monotonic() - start, 5)


def test_a_lock_held_by_a_stopped_process_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        child = process("lock", path)
        assert line(child) == "locked"
        start = time.monotonic()
        with pytest.raises(StoreTimeout, match="keeps the file locked"):
            store.set("k", "v", timeout_s=0.2)
        with pytest.raises(StoreTimeout, match="keeps the file locked"):
            FileStore(path, timeout_s=0.2)
        judge_time(time.monotonic() - start, 5)
        end(child)
        store.set("k", "v")


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", no_locks)
    with pytest.raises(StoreError, match="cannot lock .*No locks available. .*use tcp://"):
        FileStore(tmp_path / "store")


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        child = process("fill_the_disk", path)
        told = line(child)
        assert "cannot write to the store's file" in told
        assert "the limit RLIMIT_FSIZE is 100000" in told
        assert line(child) == "b'before'"
        assert line(child) == "b'after'"
        end(child)
        assert store["k"] == b"after"


def test_damage_while_in_use_is_told(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("k", "v")
        with path.open("r+b") as file:
            file.seek(len(MAGIC))
            file.write(HEADER.pack(9, 1 << 60, 1 << 60))
        with pytest.raises(StoreError, match="damaged"):
            store.get("k")
