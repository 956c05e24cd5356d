"""A signal in the middle of a store's call: its handler may call and close the same store, or raise."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import inside
from effort import HANG_S, judge_time
from unisono.engine.store import FileStore, HashStore, Store, StoreServer, TCPStore
from unisono.engine.store.operations import Get
from unisono.errors import StoreError


@contextlib.contextmanager
def on_signal(handler: Callable[[], object]) -> Iterator[None]:
    """Run `handler` whenever SIGUSR1 comes."""
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class Interrupted:
    """A lock; at its `at`-th keeping a signal comes as soon as it is held."""

    def __init__(self, lock: Any, at: int) -> None:
        self._lock = lock
        self._left = at

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def acquire(self, timeout: float = -1) -> bool:
        held: bool = self._lock.acquire(timeout=timeout)
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGUSR1)
        return held

    def release(self) -> None:
        self._lock.release()


def leave(store: Store) -> None:
    """What the end of a group does to its store: a goodbye, if that is still possible, and close."""
    with contextlib.suppress(StoreError):
        store.set("bye", "", timeout_s=HANG_S)
    store.close()


@pytest.mark.parametrize("at", [1, 2, 3])  # taking a connection, opening one, giving it back
def test_a_handler_closes_a_tcp_store_wherever_it_interrupts_it(at: int) -> None:
    with StoreServer() as server, TCPStore("127.0.0.1", server.port, timeout_s=HANG_S) as other:
        store = TCPStore("127.0.0.1", server.port, timeout_s=HANG_S)
        kept = inside.idle(store).pop()  # so that the call has to open a connection
        inside.replace_lock(store, lambda lock: Interrupted(lock, at))
        with on_signal(lambda: leave(store)):
            with contextlib.suppress(StoreError):  # it may come to nothing, but must come to an end
                store.set("k", "v")
            with pytest.raises(StoreError, match="closed"):
                store.set("k", "v")
        assert other.get("bye", timeout_s=HANG_S) == b""
        assert all(connection.sock.fileno() < 0 for connection in (kept, *inside.connections(store)))


def test_a_handler_gets_a_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not put its bytes into those of a request that is half sent."""
    with StoreServer() as server, TCPStore("127.0.0.1", server.port, timeout_s=HANG_S) as store:
        store.set("mine", "1")
        value = b"x" * 3_000_000
        pieces = iter([signal.SIGUSR1])
        send = socket.socket.sendall

        def interrupted(sock: Any, data: Any) -> None:
            number = next(pieces, None)
            send(sock, data[:7])
            if number is not None:
                signal.raise_signal(number)
            send(sock, data[7:])

        monkeypatch.setattr(socket.socket, "sendall", interrupted)
        with on_signal(lambda: store.add("mine", 1)):
            store.set("large", value)
        assert (store.get("large"), store.get("mine")) == (value, b"2")


MOMENTS = ["held", "refresh", "record", "recorded"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_handler_closes_a_file_store_wherever_it_interrupts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "store"
    with FileStore(path, 2, timeout_s=HANG_S) as other:
        store = FileStore(path, 2, timeout_s=HANG_S)
        if moment == "held":
            inside.replace_lock(store, lambda lock: Interrupted(lock, 1))
        else:
            interrupt(monkeypatch, store, moment)
        start = time.monotonic()
        with on_signal(lambda: leave(store)):
            outcome = ""
            try:
                store.set("k", "v")
            except StoreError as error:
                outcome = str(error)
        judge_time(time.monotonic() - start, 20)
        assert "closed" in outcome if moment == "held" else not outcome
        assert inside.log(store).fd < 0
        assert other.peek("k") == (None if outcome else b"v")
    assert not path.exists()


def interrupt(monkeypatch: pytest.MonkeyPatch, store: FileStore, moment: str) -> None:
    """A signal comes before the log's next `refresh` or `record`, or after it, once."""
    name = moment.removesuffix("ed")
    real = getattr(inside.log(store), name)
    calls = iter([signal.SIGUSR1])

    def interrupted(*arguments: Any) -> None:
        number = next(calls, None)
        if number is not None and name == moment:
            signal.raise_signal(number)
        real(*arguments)
        if number is not None and name != moment:
            signal.raise_signal(number)

    monkeypatch.setattr(inside.log(store), name, interrupted)


@pytest.mark.parametrize("moment", ["record", "recorded"])
def test_an_interrupted_write_leaves_all_processes_agreed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whether the change came into the file or not: this process sees what the others see."""

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    with FileStore(tmp_path / "store", 2) as store, FileStore(tmp_path / "store", 2) as other:
        store.set("k", "before")
        with monkeypatch.context() as patch:
            interrupt(patch, store, moment)
            with on_signal(ctrl_c), pytest.raises(KeyboardInterrupt):
                store.set("k", "after")
        seen = b"before" if moment == "record" else b"after"
        assert (store.get("k"), other.get("k")) == (seen, seen)
        assert store.add("n", 1) == 1 and other.add("n", 1) == 2 and store.get("n") == b"2"
        assert (inside.log(store).joined, inside.log(other).joined) == (2, 2)


def test_two_threads_close_one_file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path / "store", 2, linger_s=HANG_S)
    wait = getattr(store, inside.WAITS_FOR_OTHERS)

    def overtaken(deadline: float) -> None:
        monkeypatch.undo()
        thread = threading.Thread(target=store.close, args=(0.0,))
        thread.start()
        thread.join()
        wait(deadline)

    monkeypatch.setattr(store, inside.WAITS_FOR_OTHERS, overtaken)
    store.close()
    assert not (tmp_path / "store").exists()


def test_a_file_store_that_a_thread_keeps_busy_is_left_by_that_thread(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(path, linger_s=0)
    with inside.hold(store, time.monotonic() + 20):
        thread = threading.Thread(target=store.close)
        thread.start()
        thread.join()  # it does not wait for us for ever
        assert path.exists()
    assert inside.log(store).fd < 0 and not path.exists()


def test_a_call_that_meets_the_close_of_a_hash_store_does_not_wait() -> None:
    """It had found the store open, and comes to wait when nobody will wake it any more."""
    store = HashStore()
    store.close()
    start = time.monotonic()
    with pytest.raises(StoreError, match="closed"):
        inside.ask(store, Get("k"), b"", 60)
    judge_time(time.monotonic() - start, 30)
