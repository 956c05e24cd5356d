"""Control data: what is told arrives as it was, and an error of one rank is one of all, of the same class."""

import collections
import dataclasses
import enum
import json
import pathlib
import time
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import unisono.errors
import unisono.parallel as up
from unisono.torch.control_data import (
    broadcast_data,
    gather_on_rank_0,
    on_every_rank,
    on_rank_0,
    recv_data,
    scatter_from_rank_0,
    send_data,
)


class Pair(NamedTuple):
    first: object
    second: object = None


class Color(enum.Enum):
    RED = 1


class Named(collections.OrderedDict):
    pass


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    pairs: tuple


class Foreign(Exception):
    pass


VALUES = [
    None, True, 3, -(1 << 70), 2.5, 1j, "text", b"bytes", "long" * 5000, [1, (2, {3})],
    {"a": {(1, 2): [None]}}, Pair(1, Pair("x")), {Pair(1, 2)}, {Pair(1): [Pair(2)]}, Color.RED,
    Part("p", (Pair(1), frozenset({Pair(2)}))), Named(a=Pair(1), b=[2]), collections.OrderedDict(x=1),
    torch.bfloat16, torch.Size([2, 3]), torch.strided, torch.contiguous_format, torch.device("cpu"),
    slice(1, None, 2), range(5), pathlib.Path("a/b"), np.int64(7),
]  # fmt: skip


def check_values_arrive_as_they_were(rank, size):
    for value in VALUES:
        found = broadcast_data(value if rank == size - 1 else None, src=size - 1)
        assert (type(found), found) == (type(value), value)
        for other in on_every_rank(lambda: value):  # noqa: B023
            assert (type(other), other) == (type(value), value)


def check_tensors_arrive_as_they_were(rank, size):
    one = torch.arange(6.0).view(1, 6)[:, 2]  # of any stride
    for value in (
        torch.arange(6).view(2, 3),
        torch.randn(3).bfloat16(),
        torch.tensor(4.5),
        torch.ones(0, 2),
        one,
    ):
        found = broadcast_data([value])[0]
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert on_every_rank(lambda: torch.full((3,), rank))[-1].tolist() == [size - 1] * 3


def check_messages_of_every_length(rank, size):
    for length in (0, 1, 900, 1000, 1016, 1017, 5000, 300_000):
        wanted = ["x" * (length * place) for place in range(size)]
        assert on_every_rank(lambda: wanted[rank]) == wanted  # noqa: B023
        assert gather_on_rank_0(lambda: wanted[rank]) == ([] if rank else wanted)  # noqa: B023
        assert scatter_from_rank_0(lambda: wanted) == wanted[rank]  # noqa: B023
        assert on_rank_0(lambda: (rank, wanted)) == (0, wanted)  # noqa: B023
        if rank == 1:
            send_data(wanted, 0)
        elif rank == 0:
            assert recv_data(1) == wanted


ERRORS = [
    ValueError("wrong", 3), KeyError("key"), FileExistsError(17, "File exists", "/a/b"),
    OSError(28, "No space"), PermissionError(13, "no", "/x"), MemoryError(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    up.CaptureError("no cut", final=True), up.NoPlanFitsError("none"), unisono.errors.StoreTimeout("late"),
    unisono.errors.PeerLost("lost", rank=3, pid=4), unisono.errors.PlanError("plan"),
]  # fmt: skip


def raises(error):
    raise error


def check_an_error_of_rank_0_is_one_of_all(rank, size):
    for error in ERRORS:
        for call in (on_rank_0, scatter_from_rank_0):
            with pytest.raises(type(error)) as caught:
                call(lambda: raises(error) if rank == 0 else [])  # noqa: B023
            found = caught.value
            assert (type(found), str(found), found.args) == (type(error), str(error), error.args)
            assert vars(found) == vars(error)
    for error in (Foreign("theirs"), json.JSONDecodeError("bad", "x", 0), RuntimeError([Foreign])):
        with pytest.raises(RuntimeError) as caught:
            on_rank_0(lambda: raises(error))  # noqa: B023
        assert str(error) in str(caught.value)


def check_an_error_of_any_rank_is_one_of_all(rank, size):
    for error in ERRORS:
        for call in (on_every_rank, gather_on_rank_0):
            with pytest.raises(type(error)) as caught:
                call(lambda: raises(error) if rank == size - 1 else rank)  # noqa: B023
            assert str(caught.value) == str(error)
    with pytest.raises(ValueError, match="of rank 0"):
        on_every_rank(lambda: raises(ValueError(f"of rank {rank}")))
    assert on_every_rank(lambda: rank) == list(range(size))


def check_what_cannot_be_sent_is_refused_on_all(rank, size):
    for call in (on_rank_0, on_every_rank, gather_on_rank_0):
        with pytest.raises(TypeError, match="a builtins.function cannot be sent to other ranks"):
            call(lambda: [lambda: 3])
    for one in range(size):  # found before the first rank gets its item
        with pytest.raises(TypeError, match="a builtins.function cannot be sent to other ranks"):
            scatter_from_rank_0(lambda: [raises if place == one else place for place in range(size)])  # noqa: B023
    with pytest.raises(ValueError, match="longer|shorter"):
        scatter_from_rank_0(lambda: list(range(size + 1)))

    class Local(NamedTuple):
        a: int

    made = dataclasses.make_dataclass("Made", ["a"])
    for thing in (object(), Local(1), [made(1)], torch.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match="cannot be sent"):
            broadcast_data(thing if rank == 0 else None)


def check_rank_0_may_take_longer_than_the_timeout(rank, size):
    group = dist.new_group(timeout=timedelta(seconds=2))
    began = time.monotonic()
    assert on_rank_0(lambda: time.sleep(3.5) or 7, group) == 7
    assert time.monotonic() - began > 3
    dist.destroy_process_group(group)
