"""Where threads and signal handlers meet: futures, waiting in PyTorch's store, closing, the first CUDA call.

No processes: ranks are threads over one store, and works are stand-ins that complete when told to.
"""

import _thread
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import inside
import ranks
import unisono as un
from effort import HANG_S, judge_time
from unisono.engine.backends.torch_store import TorchStore
from unisono.errors import UnisonoError
from unisono.torch import cuda
from unisono.torch.futures import WorkFutures
from unisono.torch.process_group import ProcessGroupUnisono
from unisono.torch.work import TransferWork, UnisonoWork


class Told:
    """A work of the engine's that completes when it is told to."""

    def __init__(self) -> None:
        self._told = threading.Event()

    def tell(self) -> None:
        self._told.set()

    def wait(self, timeout: float | None = None) -> None:
        assert self._told.wait(timeout or HANG_S)

    def done(self) -> bool:
        return self._told.is_set()

    def exception(self) -> BaseException | None:
        return None


def under_way(futures: WorkFutures) -> tuple[Told, Callable[[], bool]]:
    """A work that `futures` completes a future for; and whether that is so within a few seconds."""
    native = Told()
    completed = threading.Event()
    start: torch.futures.Future[None] = torch.futures.Future()
    start.add_done_callback(lambda _: completed.set())
    futures.call_when_done(UnisonoWork(native, [], futures), lambda: start.set_result(None))
    return native, lambda: completed.wait(HANG_S)


def test_a_future_asked_for_as_the_group_closes_is_completed():
    futures = WorkFutures("futures")
    first, first_completed = under_way(futures)
    first.tell()
    assert first_completed()
    futures.close()
    second, second_completed = under_way(futures)
    second.tell()
    assert second_completed()


def start_in_gevent(*_):
    raise AssertionError("no thread is started")


@pytest.mark.parametrize("kind", [UnisonoWork, TransferWork])
def test_a_future_refuses_threads_that_are_none_of_the_system(monkeypatch, kind):
    start_in_gevent.__module__ = "gevent.thread"
    monkeypatch.setattr("_thread.start_new_thread", start_in_gevent)
    futures = WorkFutures("futures")
    work = kind(Told(), [], futures)
    with pytest.raises(RuntimeError, match=r"gevent has replaced .*thread=False"):
        work.get_future()


def test_a_future_takes_the_threads_that_a_debugger_starts(monkeypatch):
    start = _thread.start_new_thread

    def start_with_a_trace(*arguments):
        return start(*arguments)

    start_with_a_trace.__module__ = "_pydev_bundle.pydev_monkey"
    monkeypatch.setattr("_thread.start_new_thread", start_with_a_trace)
    futures = WorkFutures("futures")
    native, completed = under_way(futures)
    native.tell()
    assert completed()
    futures.close()


def test_ranks_do_not_meet_over_threads_of_eventlet(monkeypatch):
    start_in_gevent.__module__ = "eventlet.green.thread"
    monkeypatch.setattr("_thread.start_new_thread", start_in_gevent)
    with pytest.raises(RuntimeError, match=r"eventlet has replaced .*thread=False"):
        un.init_process_group(rank=0, world_size=1, store=un.HashStore())


def test_closing_in_a_handler_does_not_wait_for_threads_that_cannot_go_on(monkeypatch):
    monkeypatch.setattr("unisono.torch.futures.PATIENCE_S", 0.1)
    futures = WorkFutures("futures")
    first, first_completed = under_way(futures)
    second, second_completed = under_way(futures)
    with inside.changing(futures):  # as a handler does that interrupted `call_when_done`
        first.tell()
        closing = threading.Thread(target=futures.close, daemon=True)
        futures.close()
        closing.start()
    second.tell()
    closing.join(HANG_S)
    assert first_completed()
    assert second_completed()


def test_futures_are_completed_when_no_further_thread_can_be_had(monkeypatch):
    futures = WorkFutures("futures")
    works = [under_way(futures) for _ in range(2)]  # one thread; the second work needs it, or another

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for native, completed in works:
        native.tell()
        assert completed()
    monkeypatch.undo()
    futures.close()


class Heard(Exception):
    pass


@contextlib.contextmanager
def signalled(after_s: float) -> Iterator[None]:
    """Have a signal of a handler that raises `Heard`."""

    def handler(*_: object) -> None:
        raise Heard

    before = signal.signal(signal.SIGUSR1, handler)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(after_s, signal.pthread_kill, [main, signal.SIGUSR1])
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture(scope="module")
def tcp_store() -> dist.Store:
    """Of the module: the first one of a process opens a pipe that PyTorch never closes."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True)


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_handler_is_heard_while_a_key_is_waited_for(kind, tcp_store, tmp_path, capfd):
    inner = tcp_store if kind == "tcp" else dist.FileStore(str(tmp_path / "store"), 1)
    store = TorchStore(inner, timeout_s=HANG_S)
    began = time.monotonic()
    with pytest.raises(Heard), signalled(0.6):
        store.get("never")
    judge_time(time.monotonic() - began, HANG_S - 5)
    with pytest.raises(UnisonoError, match="did not appear within 0.7 s"):
        store.get("never", timeout_s=0.7)
    assert capfd.readouterr().err == ""  # PyTorch's TCPStore warns of every wait that ends without the keys
    late = threading.Timer(0.2, inner.set, ["late", "there"])
    late.start()
    assert store.get("late") == b"there"
    late.join()


def pair() -> list[ProcessGroupUnisono]:
    """Two ranks of one process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(ProcessGroupUnisono, store, rank, 2, timedelta(seconds=HANG_S), "world")
            for rank in range(2)
        ]
    return [one.result() for one in made]


@pytest.mark.parametrize("end", ["shutdown", "abort"])
def test_ranks_are_told_of_an_end_in_which_nccl_fails(end, monkeypatch):
    def fail(_: cuda.CudaGroup) -> None:
        raise RuntimeError("NCCL failed")

    ending, mate = pair()
    native = mate.allreduce([torch.ones(2)])
    monkeypatch.setattr(cuda.CudaGroup, end, fail)
    with pytest.raises(RuntimeError, match="NCCL failed"):
        getattr(ending, end)()
    assert inside.group_of(ending).closed
    assert inside.closing(ending)
    with pytest.raises(UnisonoError, match="rank 0"):
        native.wait()
    monkeypatch.undo()
    mate.shutdown()


def test_two_threads_make_one_group_of_nccls(monkeypatch):
    made = []

    def slowly(*_: object) -> object:
        time.sleep(0.2)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(cuda, "open_nccl", slowly)
    group = cuda.CudaGroup(dist.HashStore(), 0, 1, timedelta(seconds=HANG_S))
    with ThreadPoolExecutor(2) as pool:
        one, two = (pool.submit(lambda: group.group) for _ in range(2))
    assert one.result() is two.result()
    assert len(made) == 1


def test_two_threads_hold_their_first_storages_at_once():
    """One waited with the GIL for the other, which waited for the GIL."""
    program = Path(__file__).parent / "programs" / "first_holds_of_two_threads.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ranks.HERE), *sys.path])}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
