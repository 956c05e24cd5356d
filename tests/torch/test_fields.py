"""Options read where their fields lie say what their attributes say."""

from __future__ import annotations

import itertools
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._C import _distributed_c10d as c10d  # noqa: E402

from loops import each  # noqa: E402
from unisono import _native as native  # noqa: E402
from unisono.torch.option_offsets import by_attributes, reader  # noqa: E402

KINDS = [
    getattr(c10d, f"{name}Options")
    for name in ("Allreduce", "Broadcast", "Reduce", "Allgather", "ReduceScatter", "AllToAll", "Barrier")
]
VALUES: dict[str, list[Any]] = {
    "asyncOp": [False, True],
    "timeout": [timedelta(milliseconds=ms) for ms in (-1, 0, 5, 1_800_000)],
    "rootRank": [0, 3, 12_345, -2],
    "reduceOp": [
        *(
            getattr(c10d.ReduceOp, name)
            for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
        ),
        c10d._make_nccl_premul_sum(2.0),
    ],
}


@each("kind", KINDS)
def test_fields_say_what_attributes_say(kind: Any) -> None:
    read = reader(kind)
    assert not isinstance(read, partial), "where the fields lie was not found"
    names = [name for name in VALUES if hasattr(kind(), name)]
    said = set()
    for values in itertools.product(*(VALUES[name] for name in names)):
        opts = kind()
        for name, value in zip(names, values, strict=True):
            setattr(opts, name, value)
        assert read(opts) == by_attributes(kind, opts), values
        said.add(read(opts))
    assert len(said) == 1 + 2 * (3 if "rootRank" in names else 1) * (8 if "reduceOp" in names else 1)


class Scattered(dict):  # type: ignore[type-arg]
    """An object with attributes that has something else where pybind11 keeps a pointer."""

    asyncOp = False
    rootRank = 2
    timeout = timedelta(milliseconds=-1)


@each("held", [Scattered(), 3.5, 10**40, "text" * 100, b"\0" * 99, b"\xff" * 99, (None, 2), object(), pytest])
def test_an_object_that_is_kept_in_another_way_is_read_without_a_crash(held: object) -> None:
    assert isinstance(native.value_bytes(held), bytes)


def test_where_memory_says_nothing_attributes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for told in (b"", bytes(64)):
        monkeypatch.setattr(native, "value_bytes", lambda _, told=told: told)
        read = reader(c10d.AllreduceOptions)
        assert isinstance(read, partial)
        opts = c10d.AllreduceOptions()
        assert read(opts) == by_attributes(c10d.AllreduceOptions, opts)
