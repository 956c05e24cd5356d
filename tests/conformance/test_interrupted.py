"""A signal handler raises while an operation is handed over, or the group left: what must outlive it does."""

import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import inside
import ranks
import unisono as un
from effort import HANG_S
from loops import each
from ports import reserved
from unisono import _native

NUMEL = 1000


@contextmanager
def interrupted_at(monkeypatch: pytest.MonkeyPatch, step: str, after: bool) -> Iterator[None]:
    """Ctrl-C comes where this thread's message takes `step`, before it or right after it."""
    plain, thread = getattr(_native.NativeMessageWork, step), threading.get_ident()

    def interrupted(work: Any, *args: Any, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return plain(work, *args, **options)
        if after:
            plain(work, *args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_native.NativeMessageWork, step, interrupted)
        yield


def forgotten(call: Callable[[Any], Any]) -> weakref.ref[Any]:
    """The array of an interrupted call, which nobody else holds any more."""
    x = np.zeros(NUMEL)
    try:
        call(x)
    except KeyboardInterrupt:
        seen = weakref.ref(x)
    del x
    gc.collect()
    return seen


PATIENT = timedelta(seconds=HANG_S)  # not as a number: such a call takes the way that has its own windows
RECEIVES: dict[str, Callable[[un.Group, Any], Any]] = {
    "irecv": lambda group, x: group.irecv(x, 1, timeout=PATIENT),
    "dropped": lambda group, x: group.irecv(x, 1).wait(1e-3),
    "batch": lambda group, x: group.batch([un.SendTo(np.zeros(1), 1, 5), un.RecvFrom(x, 1)]),
    "recv": lambda group, x: group.recv(x, 1, timeout=PATIENT),
    "sendrecv": lambda group, x: group.sendrecv(np.zeros(1), 1, x, 1, timeout=PATIENT),
}


@each(
    ("call", "step", "after"),
    [
        ("irecv", "start", True),
        ("irecv", "detach", False),
        ("dropped", "wait", False),
        ("batch", "start", True),
        ("batch", "detach", False),
        ("recv", "start", True),
        ("recv", "wait_or_abort", False),
        ("sendrecv", "start", True),
        ("sendrecv", "wait_or_abort", False),
    ],
)
def test_interrupted_message(call: str, step: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = threading.Event()

    def work(group: un.Group) -> None:
        if group.rank == 1:
            assert interrupted.wait(HANG_S)
            group.send(np.full(NUMEL, 7.0), 0)
            group.send(np.zeros(1), 0)
            group.barrier()
            return
        with interrupted_at(monkeypatch, step, after):
            seen = forgotten(lambda x: RECEIVES[call](group, x))
        kept = seen() is not None
        interrupted.set()
        assert kept
        group.recv(np.zeros(1), 1)  # the first one has come before it
        assert (seen() == 7).all()
        group.barrier()
        group.close()
        assert seen() is None

    ranks.threads(2, work)


def test_ctrl_c_while_leaving_closes_the_store_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved() as port:
        group = un.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        leave = inside.planner(group).leave

        def interrupted(cause: str) -> None:
            leave(cause)
            raise KeyboardInterrupt

        monkeypatch.setattr(inside.planner(group), "leave", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 10).close()
