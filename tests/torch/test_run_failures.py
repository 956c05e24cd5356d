"""What ranks ask the job's store when a call of a run fails: as many requests each, however many they are."""

import threading
from collections import Counter
from typing import Any

import pytest

from loops import each

failures = pytest.importorskip("unisono.parallel.failures")


class CountedStore:
    """The store of a job, which counts the keys that it is asked for."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            self.asked += len(keys)
            return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        with self._lock:
            self.asked += 1
            return self._values[key]

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.asked += 1
            self._values[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.asked += 1
            number = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(number).encode()
            return number

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._lock:
            self.asked += 1
            held = self._values.get(key, b"")
            if held == expected.encode():
                self._values[key] = held = desired.encode()
            return held


class World:
    """All ranks of a job; each has begun so many collectives."""

    group_name = "run"

    def __init__(self, rank: int, size: int, calls: int = 0) -> None:
        self._rank, self._size, self._calls = rank, size, calls

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def abort(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._calls


def fail(
    monkeypatch: pytest.MonkeyPatch, size: int, raising: range, odd: int = -1
) -> tuple[int, Counter[str]]:
    """Ranks in threads raise in their first call; how many keys they ask for, and what each then raises."""
    store, texts = CountedStore(), Counter[str]()
    monkeypatch.setattr(failures.c10d, "world", lambda: (None, store))
    monkeypatch.setattr(failures.c10d, "PrefixStore", lambda _, store: store)
    monkeypatch.setattr(failures, "RAISED_S", 30.0 if len(raising) == size else 0.5)
    together = threading.Barrier(len(raising))

    def rank(number: int) -> None:
        world: Any = World(number, size, int(number == odd))
        run = failures.RunFailures(world, [world])
        run.begin()
        together.wait()
        error = ValueError("bad batch")
        try:
            run.resolve(error, together=True)
            texts["ended" if run.ended else "goes on"] += 1
        except RuntimeError as other:
            assert other.__cause__ is error
            texts["told"] += 1

    threads = [threading.Thread(target=rank, args=(number,)) for number in raising]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return store.asked, texts


@each("size", [2, 16, 200])
def test_ranks_that_all_raise_go_on(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, texts = fail(monkeypatch, size, range(size))
    assert texts == {"goes on": size}
    assert asked <= 40 * size


@each("size", [2, 16, 200])
def test_one_rank_that_does_not_raise_ends_the_run(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, texts = fail(monkeypatch, size, range(size - 1))
    assert texts == Counter({"ended": 1, "told": size - 2})
    assert asked <= 40 * size


@each("size", [2, 16])
def test_one_rank_that_raises_elsewhere_ends_the_run(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, texts = fail(monkeypatch, size, range(size), odd=size - 1)
    assert texts["ended"] >= 1
    assert texts["goes on"] == 0
    assert asked <= 40 * size
