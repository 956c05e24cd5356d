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
from unisono.torch.fields import by_attributes, reader  # noqa: E402

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


@pytest.mark.parametrize("version", ["2.13.1", "2.14.0+cu130", "2.13.0a0", "3"])
def test_another_version_of_pytorch_is_read_by_attributes(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    read = reader(c10d.AllreduceOptions)
    assert isinstance(read, partial)
    opts = c10d.AllreduceOptions()
    assert read(opts) == by_attributes(c10d.AllreduceOptions, opts)


def test_a_build_of_a_tested_version_is_read_where_fields_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert not isinstance(reader(c10d.AllreduceOptions), partial)


def test_anything_else_is_looked_at_more_closely() -> None:
    read = reader(c10d.AllreduceOptions)
    for other in (None, 3, "SUM", c10d.ReduceOp.SUM, c10d.ReduceOptions(), object()):
        assert read(other) == -1


def test_a_class_that_is_not_known_is_read_by_its_attributes() -> None:
    class Options:
        asyncOp = False
        timeout = timedelta(milliseconds=-1)
        rootRank = 2

    assert reader(Options)(Options()) == 512
