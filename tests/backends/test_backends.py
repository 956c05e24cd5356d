"""Groups over other libraries: the same methods; two ranks over Gloo. All of it: make test-backends."""

import gc
import importlib
import importlib.util
import inspect
import json
import os
import signal
import socket
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import inside
import lane
import unisono as un
from effort import HANG_S, judge_time
from loops import each
from unisono.commands.doctor import trial
from unisono.engine import backends
from unisono.engine.backends.driver import CompletedRequest, LibraryCall, LibraryDriver, LibraryRequest
from unisono.engine.group import external_planning
from unisono.engine.group.external import ExternalGroup
from unisono.plans import CONTRACTS

HERE = Path(__file__).resolve().parent
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
HAVE_MPI = importlib.util.find_spec("mpi4py") is not None


class Alone(LibraryDriver):
    """The library of one rank, which does nothing: enough for what a group checks itself."""

    name = "alone"
    failures = (OSError,)
    rank, size = 0, 1
    most_tag = 10
    answer: Exception | None = None

    def flat(self, address: int, numel: int, dtype: str) -> Any:
        return np.empty(numel)

    def copy(self, x: Any) -> Any:
        return x

    def start(self, call: LibraryCall, later: bool) -> LibraryRequest:
        self.issued += 1
        if self.answer is not None:
            raise self.answer
        return CompletedRequest()

    def send(self, x: Any, dst: int, tag: int, is_object: bool) -> LibraryRequest:
        return CompletedRequest()

    receive = send

    def subgroup(self, ranks: tuple[int, ...], number: int) -> LibraryDriver:
        return Alone()

    def is_timeout(self, failure: Exception) -> bool:
        return "late" in str(failure)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ExternalGroup, "all_gather_object", lambda self, obj, **_: [obj])
    with ExternalGroup(Alone(), "world", float("inf")) as made:
        yield made


@pytest.mark.parametrize(
    ("module", "name"), [("mpi", "MpiDriver"), ("pytorch", "GlooDriver"), ("pytorch", "NcclDriver")]
)
def test_each_driver_has_a_method_for_every_contract(module: str, name: str) -> None:
    if module == "pytorch":
        pytest.importorskip("torch")
    driver = getattr(importlib.import_module(f"unisono.engine.backends.{module}"), name)
    assert [kind for kind in CONTRACTS if not callable(getattr(driver, f"_{kind}", None))] == []


def test_it_has_the_methods_of_every_group() -> None:
    for name, method in inspect.getmembers(un.Group):
        if not name.startswith("_") and callable(method):
            assert inspect.signature(getattr(ExternalGroup, name)) == inspect.signature(method), name


REFUSED = {
    "timeout=": lambda g: g.all_reduce(np.ones(3), timeout=1),
    "algorithm='ring'": lambda g: g.all_reduce(np.ones(3), algorithm="ring"),
    "an algorithm of the caller's": lambda g: g.all_reduce(np.ones(3), algorithm=lambda rank, size, root: []),
    "reproducible=True": lambda g: g.reduce(np.ones(3), reproducible=True),
    "tag=11": lambda g: g.send(np.ones(3), 0, 11),
    "probe()": lambda g: g.probe(),
    "iprobe()": lambda g: g.iprobe(),
    "last_seen()": lambda g: g.last_seen(0),
    "choice()": lambda g: g.choice("all_reduce", 8),
    "abort()": lambda g: g.abort(),
}


@each("what", REFUSED)
def test_what_a_library_cannot_do_is_refused_with_its_reason(what: str, group: un.Group) -> None:
    with pytest.raises(un.NotSupported, match=r"^backend 'alone' does not support .*: \w+ ") as caught:
        REFUSED[what](group)
    assert (caught.value.backend, caught.value.what) == ("alone", what)
    assert group.sequence == 0, "no byte has moved"
    assert isinstance(caught.value, NotImplementedError)


def test_settings_of_the_group_are_refused_too(group: un.Group) -> None:
    with pytest.raises(un.NotSupported, match="timeout="):
        group.timeout_s = 3
    with pytest.raises(un.NotSupported, match="reproducible=True"):
        group.reproducible = True
    assert (group.timeout_s, group.reproducible) == (float("inf"), False)


@each(("answer", "kind"), [(OSError("late"), un.Timeout), (OSError("two\nlines"), un.GroupError)])
def test_what_the_library_says_is_in_the_error(answer: OSError, kind: type, group: un.Group) -> None:
    inside.planner(group).driver.answer = answer
    with pytest.raises(
        kind, match=r"all_reduce failed \[group=world rank=0/1 backend=alone\]: (late|two / lines)"
    ):
        group.all_reduce(np.ones(3))


def test_the_end_of_the_group(group: un.Group) -> None:
    work = group.all_reduce(np.ones(3), async_op=True)
    work.wait()
    assert repr(work) == "<Work all_reduce of group 'world': done>"
    assert group.all_reduce(2.5) == 2.5
    group.close()
    with pytest.raises(un.GroupClosed):
        group.barrier()


class Stuck(LibraryRequest):
    """What does not end before its library is told to."""

    ended = False

    def done(self) -> bool:
        return self.ended

    def block(self) -> None:
        self.ended = True


def test_buffers_stay_while_the_library_uses_them(group: un.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed memory would be written to: by a call that ran out of time, and after the group was closed."""
    stuck, kept = Stuck(), []
    driver = inside.planner(group).driver
    monkeypatch.setattr(driver, "deadlines", True)
    monkeypatch.setattr(driver, "start", lambda call, later: stuck)
    monkeypatch.setattr(external_planning, "keep_for_ever", lambda *what: kept.append(what))
    monkeypatch.setattr(external_planning, "CLOSING_S", 0.01)
    x = np.ones(3)
    with pytest.raises(un.Timeout, match="goes on"):
        group.all_reduce(x, timeout=0.01)
    later = group.all_reduce(np.ones(3), async_op=True)
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is not None
    group.close()
    assert kept[0][0] is driver
    assert held() is not None
    with pytest.raises(un.GroupError, match="this rank closed the group"):
        later.wait()
    assert "failed" in repr(later)


@each(
    ("arguments", "error", "text"),
    [
        ({"backend": "nonsense"}, ValueError, "there is no backend 'nonsense'. Choose native, mpi"),
        ({"backend": "unisono"}, ValueError, "import unisono.torch"),
        ({"backend": "gloo", "reproducible": True}, un.NotSupported, "reproducible=True"),
        ({"backend": "mpi", "timeout": 3}, un.NotSupported, "timeout=: MPI has no deadlines"),
        ({"backend": "mpi", "init_method": "env://"}, un.NotSupported, "met in mpiexec"),
        ({"backend": "gloo", "world_size": 1.0}, TypeError, "world_size is 1.0, expected a whole number"),
        ({"backend": "mpi", "rank": "0"}, TypeError, "rank is '0', expected a whole number"),
        ({"backend": "gloo", "group_name": 3}, TypeError, "group_name is a int"),
        ({"backend": "gloo", "reproducible": "no"}, TypeError, "reproducible is a str"),
    ],
)
def test_wrong_backends(arguments: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        un.init_process_group(**arguments)


@pytest.mark.skipif(HAVE_MPI, reason="mpi4py is installed")
def test_a_backend_that_is_not_there_says_what_to_install() -> None:
    assert not backends.is_available("mpi")
    with pytest.raises(
        un.NotSupported, match="not available here: No module named 'mpi4py'. pip install mpi4py mpich"
    ):
        un.init_process_group("mpi")


def test_auto_is_the_engine() -> None:
    with un.init_process_group("auto", world_size=1, rank=0) as group:
        assert isinstance(group, un.Group)
        assert not isinstance(group, ExternalGroup)


@needs_torch
def test_ctrl_c_ends_the_wait_for_a_collective_of_gloo() -> None:
    store, come = un.HashStore(HANG_S), threading.Event()

    def other() -> list[float]:
        with un.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=HANG_S) as group:
            x = np.ones(3)
            group.all_reduce(x)
            come.wait()
            group.all_reduce(x)
            return x.tolist()

    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(other)
        with un.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=HANG_S) as group:
            x = np.ones(3)
            group.all_reduce(x)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            began = time.monotonic()
            try:
                with pytest.raises(KeyboardInterrupt):
                    group.all_reduce(x)
                judge_time(time.monotonic() - began, 5)
            finally:
                come.set()
            assert peer.result() == [4.0] * 3


@needs_torch
def test_a_reduce_scatter_over_gloo_is_done_without_a_wait() -> None:
    with un.init_process_group(
        "gloo", store=un.HashStore(HANG_S), rank=0, world_size=1, timeout=HANG_S
    ) as group:
        assert group.reduce_scatter(np.ones((1, 3)), timeout=HANG_S).tolist() == [1.0] * 3
        work = group.reduce_scatter(np.ones((1, 3)), async_op=True)
        assert un.wait_any([work], timeout=HANG_S) == 0


@pytest.fixture
def mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if MPICH's mpiexec had started this rank, the only one."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "UNISONO_TOKEN", "UNISONO_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


def test_auto_under_mpiexec_meets_with_a_token_that_mpi_tells(
    mpiexec: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, bytes]] = []

    def broadcast(offer: tuple[str, bytes]) -> tuple[str, bytes]:
        told.append(offer)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(offer[0].rpartition(":")[2])))  # nobody else gets the port
        return offer

    comm = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1, allgather=lambda x: [x])
    comm.bcast = broadcast
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(COMM_WORLD=comm))
    with un.init_process_group("auto"):
        [(url, _)] = told
        with pytest.raises(un.AuthenticationError):
            un.TCPStore("127.0.0.1", int(url.rpartition(":")[2]), timeout_s=2)


def test_auto_goes_on_where_mpi4py_finds_no_library(mpiexec: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with un.init_process_group("auto", init_method=None, store=None, world_size=1, rank=0) as group:
        assert group.size == 1


def test_the_page_has_every_operation_that_is_tried() -> None:
    table = lane.table()
    assert list(table) == list(backends.BACKENDS)
    for written in table.values():
        assert list(written) == list(trial.OPERATIONS)
        assert set(written.values()) <= {"yes", "no"}


@needs_torch
@each("name", ["native", "gloo"])
def test_the_page_says_what_two_ranks_do(name: str) -> None:
    assert lane.differences(name) == []


@pytest.mark.torch
def test_two_ranks_over_gloo(forks: Any, tmp_path: Path) -> None:
    forks.run_program(tmp_path, 2, HERE / "two_ranks.py")


@pytest.mark.torch
def test_conformance_over_gloo(forks: Any, tmp_path: Path) -> None:
    first, *_ = forks.run_program(tmp_path, 3, HERE / "program.py", "gloo", "quick")
    _, found, told = first.partition("REPORT ")
    assert found, first
    assert json.loads(told.partition("\n")[0])["tests"]["passed"] > 60
