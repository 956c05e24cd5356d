"""Every error and every public value survives what multiprocessing, Ray and `copy` do to it."""

import contextlib
import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil

import msgspec
import numpy as np
import pytest

import unisono as un
from effort import HANG_S
from loops import each
from unisono.engine.costs.tuner import AlgorithmChoice
from unisono.engine.diagnosis.fault_text import error
from unisono.engine.diagnosis.report import CallDescription, FaultReport, RankSnapshot
from unisono.engine.store.client_handshake import NotOurServer
from unisono.errors import PeerLost, UnisonoError

FIELDS: dict[type[UnisonoError], dict] = {
    PeerLost: {"rank": 3, "pid": 4121, "signal": 9},
    NotOurServer: {"reason": "no token"},
}
LIVING = {
    "FileStore",
    "Group",
    "HashStore",
    "PrefixStore",
    "Publication",
    "Queue",
    "Store",
    "StoreServer",
    "Subscription",
    "TCPStore",
    "Window",
    "Work",
}


def arrived() -> un.Status:
    """What a message tells: made by the engine only."""
    with un.init_process_group(store=un.HashStore(), rank=0, world_size=1) as group:
        group.isend(np.ones(3), 0, 5)
        return group.recv(np.zeros(4), 0, 5)


VALUES = [
    un.Departure(1, "a", 17, "stopped", "in barrier #2", 0),
    un.SUM,
    un.premul_sum(0.5),
    un.LowRank(rank=2),
    un.Piece(b"an array", (0,), (8,)),
    un.SendTo(b"abc", 1, 7),
    un.RecvFrom(bytearray(3), un.ANY_TAG),
    AlgorithmChoice("ring", 1e-3, calibrated=True),
    arrived(),
]
WAYS = [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy]


def errors() -> list[type[UnisonoError]]:
    """Every error of the package, those that are not exported included."""
    for info in pkgutil.walk_packages(un.__path__, "unisono.", onerror=lambda name: None):
        if not info.name.endswith(("_native", "__main__")):
            with contextlib.suppress(ModuleNotFoundError):  # PyTorch is not there
                importlib.import_module(info.name)
    found, left = [], [UnisonoError]
    while left:
        kind = left.pop()
        found.append(kind)
        left += kind.__subclasses__()
    return [kind for kind in found if kind.__module__.startswith("unisono")]


class MoreLost(PeerLost):
    """A user's own, with an `__init__` that takes something else."""

    def __init__(self, *, shard: str) -> None:
        super().__init__(f"lost with {shard}", rank=1, pid=2, exit_code=3)
        self.shard = shard


def lose(rank: int) -> None:
    raise PeerLost("all_reduce failed: rank 1 died", rank=rank, pid=4121, signal=9)


@each("way", WAYS)
def test_every_error_survives(way):
    kinds = errors()
    assert PeerLost in kinds
    assert len(kinds) > 12
    for kind in kinds:
        made = kind("what happened", **FIELDS.get(kind, {}))
        made.add_note("and a note") if hasattr(made, "add_note") else None
        same = way(made)
        assert type(same) is kind
        assert (str(same), same.args, vars(same)) == (str(made), made.args, vars(made))


STATE = RankSnapshot(0, "a", 4121, 2, 1, "in barrier #2", CallDescription("barrier", ()), "train.py:9")
REPORT = FaultReport(
    kind="timeout",
    group="world",
    size=2,
    reporter=0,
    found_by=0,
    operation="barrier",
    sequence=2,
    rank=1,
    missing=(1,),
    ranks=(STATE, RankSnapshot(1, "a", 4122, 1, 1, "after barrier #1")),
)


@each("way", WAYS)
def test_the_report_survives_with_its_error(way):
    same = way(error(REPORT))
    assert (type(same), same.missing, same.report) == (un.Timeout, (1,), REPORT)
    mismatch = way(un.Mismatch("text", report=REPORT))
    assert mismatch.calls == {0: "barrier()"}
    assert mismatch.report.ranks[0].place == "train.py:9"


def test_a_report_is_immutable_and_its_numbers_are_checked():
    with pytest.raises(AttributeError):
        REPORT.size = 3
    for wrong in ({"rank": 2}, {"found_by": -1}, {"missing": (7,)}, {"kind": "no such"}, {"size": 3}):
        with pytest.raises(ValueError, match="fault"):
            msgspec.structs.replace(REPORT, **wrong)
    assert msgspec.json.decode(msgspec.json.encode(REPORT), type=FaultReport) == REPORT


@each("way", WAYS)
def test_a_users_subclass_survives(way):
    same = way(MoreLost(shard="shard 7"))
    assert (type(same), same.shard, same.rank, same.exit_code) == (MoreLost, "shard 7", 1, 3)
    assert str(same) == "lost with shard 7"


@each("way", WAYS)
def test_every_public_value_survives(way):
    for value in VALUES:
        assert way(value) == value
        assert type(way(value)) is type(value)
    exported = {name for name in un.__all__ if inspect.isclass(getattr(un, name))}
    known = {type(value).__name__ for value in VALUES} | {kind.__name__ for kind in errors()} | LIVING
    assert exported - known == set(), "a new class: is it a value, an error, or something that lives?"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # a worker has a thread
def test_an_error_comes_out_of_a_pool():
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(PeerLost) as caught:
        pool.apply_async(lose, (1,)).get(timeout=HANG_S)
    assert (caught.value.rank, caught.value.pid, caught.value.signal) == (1, 4121, 9)
