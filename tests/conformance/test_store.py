"""One suite over every store: whatever holds the bytes, the semantics are the same."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from effort import HANG_S, judge_time, times
from loops import each, within
from stores import KINDS, Place
from unisono.engine.store import PrefixStore, Store
from unisono.errors import StoreError, StoreTimeout


@contextmanager
def opened(kind: str) -> Iterator[dict[str, Any]]:
    """A place of this kind, and two clients there."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(kind, Path(folder))
        try:
            yield {"place": place, "store": place.open(), "other": place.open()}
        finally:
            place.close()


GIVES = "place store other"
over_all_stores = within("kind", KINDS, opened, GIVES)
UNDER_NO_PREFIX = [kind for kind in KINDS if not kind.startswith("prefix")]


def later(seconds: float, action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


@over_all_stores
def test_set_is_seen_by_the_other(store: Store, other: Store) -> None:
    store.set("k", b"\x00\xff")
    assert other.get("k") == b"\x00\xff"
    other.set("k", "text \N{GREEK SMALL LETTER ALPHA}")
    assert store.get("k") == "text \N{GREEK SMALL LETTER ALPHA}".encode()
    store.set("k", b"")
    assert other.get("k") == b""


@over_all_stores
def test_get_waits_for_the_key(store: Store, other: Store) -> None:
    start = time.monotonic()
    timer = later(0.15, lambda: other.set("late", "x"))
    assert store.get("late") == b"x"
    assert time.monotonic() - start > 0.1
    timer.join()


@over_all_stores
def test_wait_waits_for_all_keys(store: Store, other: Store) -> None:
    other.set("a", "")
    start = time.monotonic()
    timers = [later(0.05, lambda: other.add("b", 1)), later(0.15, lambda: other.compare_set("c", "", "x"))]
    store.wait(["a", "b", "c"])
    assert time.monotonic() - start > 0.1
    for timer in timers:
        timer.join()


@over_all_stores
def test_wait_sees_a_key_that_came_and_went(store: Store, other: Store) -> None:
    def come_and_go() -> None:
        other.set("a", "")
        time.sleep(0.1)
        other.set("b", "")

    timer = later(0.05, come_and_go)
    store.wait(["a", "b"])
    store.wait([])
    timer.join()


@over_all_stores
def test_timeout_names_the_keys_and_the_store_stays_usable(store: Store) -> None:
    store.set("there", "")
    start = time.monotonic()
    with pytest.raises(StoreTimeout, match=r"key 'gone' did not appear within 0\.1 s .*Store") as caught:
        store.get("gone", timeout_s=0.1)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(StoreTimeout, match="2 keys .'gone', 'lost'. did"):
        store.wait(["there", "gone", "lost"], timeout_s=0.1)
    with pytest.raises(StoreTimeout):
        store.get("gone", timeout_s=0)
    judge_time(time.monotonic() - start, 5)
    assert store.get("there", timeout_s=0) == b""


@over_all_stores
def test_the_default_timeout_can_be_changed(store: Store) -> None:
    store.timeout_s = 0.05
    assert store.timeout_s == 0.05
    with pytest.raises(StoreTimeout, match=r"0\.05 s"):
        store.get("gone")
    store.timeout_s = 10.0


@over_all_stores
def test_add_counts_in_decimal_text(store: Store, other: Store) -> None:
    assert store.add("n", 5) == 5
    assert other.add("n", -2) == 3
    assert store.get("n") == b"3"
    store.set("n", b"12")
    assert other.add("n", 3) == 15
    assert other.get("n") == b"15"


@each("held", [b"", b"abc", b"1.5", b"\xff", b"9" * 100])
@over_all_stores
def test_add_to_something_else_is_an_error_and_changes_nothing(store: Store, held: bytes) -> None:
    store.set("n", held)
    with pytest.raises(StoreError, match="add"):
        store.add("n", 1)
    assert store.get("n") == held


@over_all_stores
def test_add_stays_within_64_bits(store: Store) -> None:
    assert store.add("n", 2**63 - 1) == 2**63 - 1
    with pytest.raises(StoreError, match="64-bit"):
        store.add("n", 1)
    assert store.add("n", -(2**63)) == -1


@over_all_stores
def test_compare_set_follows_pytorch(store: Store, other: Store) -> None:
    assert store.compare_set("k", "wrong", "new") == b"wrong"  # absent, expected not empty
    assert not store.check(["k"])
    assert store.compare_set("k", "", "new") == b"new"  # absent, expected empty
    assert other.compare_set("k", "wrong", "x") == b"new"  # present, differs
    assert other.compare_set("k", "new", "newer") == b"newer"  # present, equal
    assert store.get("k") == b"newer"
    assert store.compare_set("k", "", "x") == b"newer"


@over_all_stores
def test_delete_check_and_count(store: Store, other: Store) -> None:
    assert store.num_keys() == 0
    store.set("a", "1")
    store.set("b", "2")
    assert other.num_keys() == 2
    assert other.check(["a", "b"])
    assert not other.check(["a", "c"])
    assert other.check([])
    assert other.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a"])
    assert store.num_keys() == 1


@over_all_stores
def test_dict_like_view(store: Store) -> None:
    assert len(store) == 0
    assert store  # an empty store is not nothing
    store["k"] = "v"
    assert store["k"] == b"v"
    assert "k" in store
    assert 7 not in store
    del store["k"]
    assert "k" not in store
    with pytest.raises(KeyError):
        store["k"]
    with pytest.raises(KeyError):
        del store["k"]
    assert dict(store) == {}


@over_all_stores
def test_keys_are_listed(store: Store, other: Store) -> None:
    for key in ("a/1", "a/2", "b", "\N{SNOWMAN}"):
        store[key] = key
    assert sorted(other.keys()) == sorted(other) == ["a/1", "a/2", "b", "\N{SNOWMAN}"]
    assert sorted(other.keys("a/")) == ["a/1", "a/2"]
    assert sorted(PrefixStore("a", other)) == ["1", "2"]
    assert other.keys("c") == []
    assert dict(PrefixStore("a", store)) == {"1": b"a/1", "2": b"a/2"}
    for wrong in (1, None, b"a"):
        with pytest.raises(TypeError, match="prefix"):
            store.keys(wrong)  # type: ignore[arg-type]


@each("key", ["", "a/b", "\x00", "\N{SNOWMAN}" * 300, "room/x"])
@over_all_stores
def test_any_text_is_a_key(store: Store, other: Store, key: str) -> None:
    store.set(key, "v")
    assert other.get(key) == b"v"
    assert other.delete_key(key)


@over_all_stores
def test_wrong_arguments_are_refused(store: Store) -> None:
    with pytest.raises(TypeError, match="key"):
        store.set(b"k", "v")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bytes or str"):
        store.set("k", 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="list of keys"):
        store.wait("abc")
    with pytest.raises(TypeError, match="int"):
        store.add("n", 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="64-bit"):
        store.add("n", 2**63)
    with pytest.raises(ValueError, match="surrogates"):
        store.set("\ud800", "v")
    for wrong in (-1.0, float("nan"), float("-inf")):
        with pytest.raises(ValueError, match="timeout_s"):
            store.get("k", timeout_s=wrong)
    with pytest.raises(TypeError, match="timeout_s"):
        store.get("k", timeout_s="1")  # type: ignore[arg-type]
    assert store.num_keys() == 0


@over_all_stores
def test_bytes_like_values(store: Store) -> None:
    changing = bytearray(b"before")
    store.set("k", changing)
    changing[:] = b"after!"
    assert store.get("k") == b"before"
    store.set("k", memoryview(b"abcd")[1:3])
    assert store.get("k") == b"bc"


@over_all_stores
def test_large_values(store: Store, other: Store) -> None:
    large = os.urandom(1 << 16) * (times(usual=16, long=64) << 4)  # MiB
    store.set("large", large)
    assert other.get("large") == large
    assert other.compare_set("large", "x", "y") == large


@over_all_stores
def test_add_from_many_threads_counts_right(place: Place) -> None:
    stores = [place.open() for _ in range(6)]

    def count(mine: Store) -> None:
        for _ in range(40):
            mine.add("n", 1)

    threads = [threading.Thread(target=count, args=(mine,)) for mine in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].get("n") == b"240"


@over_all_stores
def test_one_object_serves_several_threads_while_one_of_them_waits(store: Store) -> None:
    got: list[bytes] = []
    waiter = threading.Thread(target=lambda: got.append(store.get("k", timeout_s=HANG_S)))
    waiter.start()
    time.sleep(0.05)
    store.set("k", "v")  # the same object: must not have to wait for the waiter
    waiter.join(HANG_S)
    assert got == [b"v"]


@within("kind", UNDER_NO_PREFIX, opened, GIVES)  # a prefix store leaves the store under it open
def test_close_wakes_a_waiting_thread_and_ends_the_use(store: Store) -> None:
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            store.get("never", timeout_s=HANG_S)
        except StoreError as error:
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.1)
    store.close()
    waiter.join(HANG_S)
    assert len(failures) == 1
    assert not isinstance(failures[0], StoreTimeout)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("k")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # threads and fork: that is the point
@over_all_stores
def test_a_forked_child_gets_a_clear_error(store: Store) -> None:
    store.set("k", "v")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = b"no error"
        try:
            store.get("k", timeout_s=1)
        except StoreError as error:
            text = str(error).encode()
        os.write(write, text)
        store.close()
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    assert f"opened by process {os.getpid()}" in text
    assert store.get("k") == b"v"  # the parent's is none the worse


@over_all_stores
def test_an_interrupt_ends_a_wait_at_once(store: Store) -> None:
    main = threading.main_thread().ident or 0
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        timer = later(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
        store.get("never", timeout_s=HANG_S)
    judge_time(time.monotonic() - start, 5)
    timer.join()
    store.set("k", "v")
    assert store.get("k") == b"v"


@over_all_stores
def test_prefixes_are_apart(place: Place) -> None:
    under = place.open()
    one, two = PrefixStore("1", under), PrefixStore("2", under)
    one.set("k", "one")
    two.set("k", "two")
    assert (one.get("k"), two.get("k"), under.get("1/k")) == (b"one", b"two", b"one")
    assert (len(one), len(under)) == (1, 2)
    assert one.delete_key("k")
    assert two.check(["k"])
    with pytest.raises(StoreTimeout, match="key 'gone'"):
        one.wait(["gone"], timeout_s=0.05)
    one.close()
    assert under.check(["2/k"])
