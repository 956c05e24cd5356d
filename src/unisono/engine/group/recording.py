"""What a rank calls, and when: `unisono run --record FILE` collects it from all ranks (UNISONO_RECORD).

The methods of a recorded group note each call: its name, group, bytes and algorithm, when it began and when
it returned. What lies between two calls is compute. The fast path of PyTorch's calls is off. At the end of
the process the notes are written to FILE.rank<r>; the launcher makes one program of all of them
(`simulation/recording.py`).

A call that is made by another call, by a recorded one, is not noted. Nor is what a subgroup needs to be made.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from unisono import _native
from unisono.engine.encoding.call_events import CallEvent, RankRecording
from unisono.engine.group.messages import RecvFrom, SendTo

if TYPE_CHECKING:
    from unisono.engine.group.group import Group

__all__ = ["record"]

COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "scan", "exclusive_scan", "barrier", "all_gather", "all_gather_v"),
    *("gather", "scatter", "reduce_scatter", "all_to_all", "all_reduce_coalesced", "broadcast_coalesced"),
    *("all_gather_coalesced", "reduce_scatter_coalesced"),
)
OBJECTS = (
    *("broadcast_object", "all_gather_object", "gather_object", "scatter_object", "all_to_all_object"),
)
MESSAGES = (
    "send",
    "recv",
    "isend",
    "irecv",
    "_irecv_whole",
    "sendrecv",
    "batch",
    "send_object",
    "recv_object",
    "recv_bytes",
    "irecv_object",
    "irecv_bytes",
)
OBJECT_BYTES = 256
"""Of an object, whose size is not noted."""

BUFFERS = ("x", "out", "inputs", "given", "xs", "outs")
ROOTS = ("src", "dst")


class CallRecorder:
    """The notes of this process."""

    def __init__(self, file: str) -> None:
        self.file = os.path.abspath(file)
        self.pid = os.getpid()
        self.events: list[CallEvent] = []
        self.handles: dict[int, int] = {}  # id of a work -> its number
        self.incoming: dict[int, tuple[tuple[str, tuple[int, ...]], int]] = {}  # of a receive's work
        self.count = 0
        self.rank, self.size = -1, 0
        self.inside = threading.local()
        atexit.register(self.write)

    def write(self) -> None:
        """Write what was noted."""
        if os.getpid() != self.pid or self.rank < 0:  # a fork of the rank
            return
        data = msgspec.msgpack.encode(RankRecording(self.rank, self.size, self.events))
        with suppress(OSError), open(f"{self.file}.rank{self.rank}", "wb") as part:
            part.write(data)

    def timed(self, call: Callable[[], Any], note: Callable[[Any], dict[str, Any]]) -> Any:
        """Run a call; note it with what `note` says of its result, unless another one runs it."""
        if getattr(self.inside, "busy", False):
            return call()
        self.inside.busy = True
        begin, cpu_begin = time.perf_counter_ns(), time.process_time_ns()
        try:
            result = call()
        finally:
            self.inside.busy = False
        noted = note(result)  # before the end: it is no compute
        end, cpu_end = time.perf_counter_ns(), time.process_time_ns()
        self.events.append(CallEvent(**noted, begin_ns=begin, end_ns=end,
                                     cpu_begin_ns=cpu_begin, cpu_end_ns=cpu_end))  # fmt: skip
        return result

    def forget(self, work: Any) -> None:
        """Forget an earlier work that nobody waited for, whose id this new one has."""
        self.handles.pop(id(work), None)
        self.incoming.pop(id(work), None)

    def handle_of(self, work: Any) -> int:
        """A number for an asynchronous call."""
        if work is None or not hasattr(work, "wait"):
            return 0
        self.forget(work)
        self.count += 1
        self.handles[id(work)] = self.count
        return self.count

    def waited(self, work: Any, call: Callable[[], Any]) -> Any:
        """A wait for a work; only the first one of each is noted."""
        handle = self.handles.pop(id(work), 0)
        incoming = self.incoming.pop(id(work), None)
        if incoming is not None:
            group, peer = incoming
            return self.timed(
                call, lambda _: {"name": "recv", "group": group, "peer": _source(work, group, peer)}
            )
        if not handle:
            return call()
        return self.timed(call, lambda _: {"name": "wait", "waits": handle})


def _source(work: Any, group: tuple[str, tuple[int, ...]], peer: int) -> int:
    return group[1][work.source] if peer < 0 else peer


@functools.cache
def _recorder(file: str) -> CallRecorder:
    """The recorder of this process; its works note their waits."""
    recorder = CallRecorder(file)
    for kind, names in (
        (_native.CollectiveWork, ("wait", "result")),
        (_native.NativeMessageWork, ("wait", "result")),
    ):
        for name in names:
            _note_waits(recorder, kind, name)
    return recorder


def _note_waits(recorder: CallRecorder, kind: Any, name: str) -> None:
    plain = getattr(kind, name)

    @functools.wraps(plain)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder.waited(work, lambda: plain(work, *args, **kwargs))

    setattr(kind, name, wait)


def record(group: Group, file: str) -> None:
    """Note the calls of a group, from now on."""
    recorder = _recorder(file)
    members = group.members
    if recorder.rank < 0:
        recorder.rank, recorder.size = members[group.rank], len(members)
    key = group.name, members
    for name in COLLECTIVES:
        _replace(recorder, group, name, functools.partial(_collective, recorder, key))
    for name in OBJECTS:
        _replace(recorder, group, name, functools.partial(_object, recorder, key))
    for name in MESSAGES:
        _replace(recorder, group, name, functools.partial(_message, recorder, key))
    patched: Any = group
    patched._repeat = lambda *_: NotImplemented
    patched._send_now = patched._recv_now = lambda *_: None


Note = Callable[[str, dict[str, Any], Any], dict[str, Any]]


def _replace(recorder: CallRecorder, group: Group, name: str, note: Note) -> None:
    plain = getattr(type(group), name)
    signature = inspect.signature(plain)
    held = weakref.ref(group)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        alive = held()
        assert alive is not None
        return recorder.timed(
            lambda: plain(alive, *args, **kwargs),
            lambda result: note(name, dict(signature.bind(alive, *args, **kwargs).arguments), result),
        )

    setattr(group, name, call)


def _collective(
    recorder: CallRecorder, key: tuple[str, tuple[int, ...]], name: str, given: dict[str, Any], result: Any
) -> dict[str, Any]:
    sizes = [nbytes_of(given.get(buffer)) for buffer in BUFFERS]
    kind = name.removesuffix("_coalesced").removesuffix("_v")
    later = bool(given.get("async_op"))
    made = 0 if later or result is None else nbytes_of(result)
    mine = min((size for size in (*sizes, made) if size), default=0)  # a rank's own block, of blocks
    blocks = kind in ("all_gather", "gather", "scatter", "reduce_scatter") and not name.endswith("_v")
    algorithm = given.get("algorithm")
    return {
        "name": kind,
        "group": key,
        "nbytes": max(*sizes, made, mine * len(key[1]) if blocks else 0),
        "algorithm": algorithm if isinstance(algorithm, str) else "",
        "root": next((int(given[root]) for root in ROOTS if root in given), 0),
        "handle": recorder.handle_of(result) if later else 0,
    }


def _object(
    recorder: CallRecorder,  # noqa: ARG001  # one signature for all notes
    key: tuple[str, tuple[int, ...]],
    name: str,
    given: dict[str, Any],
    result: Any,  # noqa: ARG001
) -> dict[str, Any]:
    root = next((int(given[root]) for root in ROOTS if root in given), 0)
    nbytes = OBJECT_BYTES * (1 if name == "broadcast_object" else len(key[1]))
    return {"name": name.removesuffix("_object"), "group": key, "nbytes": nbytes, "root": root}


def _message(
    recorder: CallRecorder, key: tuple[str, tuple[int, ...]], name: str, given: dict[str, Any], result: Any
) -> dict[str, Any]:
    kind = name.removesuffix("_object").removesuffix("_bytes").removesuffix("_whole")
    kind = kind.removeprefix("_").removeprefix("i")
    members = key[1]
    for work in result if isinstance(result, list) else [result]:
        recorder.forget(work)
    if name == "batch":
        for one, work in zip(given["messages"], result, strict=True):
            if isinstance(one, RecvFrom):
                recorder.incoming[id(work)] = key, -1 if one.src is None else members[int(one.src)]
        sends = [one for one in given["messages"] if isinstance(one, SendTo)]
        for one in sends[:-1]:
            recorder.events.append(_sent(key, members[int(one.dst)], nbytes_of(one.x)))
        last = sends[-1] if sends else None
        peer, nbytes = (-1, 0) if last is None else (members[int(last.dst)], nbytes_of(last.x))
        return {"name": "send" if sends else "none", "group": key, "peer": peer, "nbytes": nbytes}
    if name == "sendrecv":
        recorder.events.append(_sent(key, members[int(given["dst"])], nbytes_of(given["x"])))
    source = given.get("src")
    if kind == "send":
        peer = members[int(given["dst"])]
    elif name.lstrip("_").startswith("irecv"):
        recorder.incoming[id(result)] = key, -1 if source is None else members[int(source)]
        return {"name": "none", "group": key}
    elif source is None:
        status = result[-1] if isinstance(result, tuple) else result
        peer = members[status.source] if isinstance(status, _native.Status) else -1
    else:
        peer = members[int(source)]
    nbytes = nbytes_of(given.get("x")) if "x" in given else OBJECT_BYTES
    return {"name": "send" if kind == "send" else "recv", "group": key, "peer": peer, "nbytes": nbytes}


def _sent(key: tuple[str, tuple[int, ...]], peer: int, nbytes: int) -> CallEvent:
    now, cpu = time.perf_counter_ns(), time.process_time_ns()
    return CallEvent("send", now, now, cpu, cpu, key, nbytes, peer=peer)


def nbytes_of(value: Any) -> int:
    """The bytes of a buffer, a list of buffers, or a number; 0 of what is none."""
    if value is None:
        return 0
    if isinstance(value, (list, tuple)):
        return sum(map(nbytes_of, value))
    if isinstance(value, (int, float)):
        return 8
    found = getattr(value, "nbytes", None)
    if isinstance(found, int):
        return found
    with suppress(TypeError):
        return memoryview(value).nbytes
    return 0
