"""A queue of one writer and n readers: latency, the cost of waiting, one large message.

    python benchmarks/queues.py --readers 8
    python benchmarks/queues.py --vllm vllm/distributed/device_communicators/shm_broadcast.py

Each way has processes of its own, one after another. It measures, per reader: the time from `put` to the end
of `get` at 100 messages/s (p50, p99), CPU seconds per second at that rate and when nothing comes, and the
seconds until all readers have a message of 200 MB (its first element is read; best of `--rounds`).

`--vllm` names the file of vLLM's `MessageQueue`. What it imports of vLLM is settings and names, which stand
here; its queue runs as it is. It and the PUB socket need zmq. Without them these ways are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

KEPT: list[Any] = []
Put, Get = Callable[[Any], None], Callable[[], Any]


def unisono_queue(rank: int, size: int, folder: str, _: Any, __: str) -> tuple[Put, Get]:
    """Arrays of `get` are views of shared memory."""
    import unisono as un

    group = un.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=size)
    queue = group.queue(bytes=512 << 20)
    KEPT.append(group)  # its end would end the queue
    return queue.put, queue.get


def multiprocessing_queue(rank: int, size: int, _: str, queues: Any, __: str) -> tuple[Put, Get]:
    """One `multiprocessing.Queue` for each reader."""

    def put(obj: Any) -> None:
        for each in queues[1:size]:
            each.put(obj)

    return put, queues[rank].get


def zmq_pub(rank: int, _: int, folder: str, __: Any, ___: str) -> tuple[Put, Get]:
    """A PUB socket over a Unix socket, with pickle; nothing waits for slow readers."""
    import pickle

    import zmq

    sock = zmq.Context().socket(zmq.SUB if rank else zmq.PUB)
    sock.set_hwm(0)
    if rank == 0:
        sock.bind(f"ipc://{folder}/pub")
    else:
        sock.connect(f"ipc://{folder}/pub")
        sock.setsockopt(zmq.SUBSCRIBE, b"")
    return (
        lambda obj: sock.send(pickle.dumps(obj, 5), copy=False),
        lambda: pickle.loads(sock.recv(copy=False).buffer),
    )


def vllm_queue(rank: int, size: int, _: str, queues: Any, path: str) -> tuple[Put, Get]:
    """vLLM's `MessageQueue`, its chunks of 24 MiB."""
    stand_in("envs", VLLM_USE_SPINLOOP_EXT=False, VLLM_RINGBUFFER_WARNING_INTERVAL=60)
    stand_in("distributed")
    stand_in("distributed.utils", StatelessProcessGroup=type(None), sched_yield=os.sched_yield)
    stand_in("logger", init_logger=logging.getLogger)
    stand_in("platforms", current_platform=None)
    stand_in("utils")
    stand_in("utils.cpu_resource_utils", check_cgroup_memory_available=lambda *_, **__: None)
    stand_in(
        "utils.network_utils",
        get_ip=lambda: "127.0.0.1",
        get_open_zmq_inproc_path=lambda: f"inproc://{uuid.uuid4()}",
        get_open_zmq_ipc_path=lambda: f"ipc://{tempfile.gettempdir()}/{uuid.uuid4()}",
        is_valid_ipv6_address=lambda _: False,
    )
    spec = importlib.util.spec_from_file_location("shm_broadcast", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shm_broadcast"] = module
    spec.loader.exec_module(module)
    if rank == 0:
        queue = module.MessageQueue(size - 1, size - 1, max_chunk_bytes=24 << 20, max_chunks=10)
        for each in queues[1:size]:
            each.put(queue.export_handle())
    else:
        queue = module.MessageQueue.create_from_handle(queues[rank].get(), rank - 1)
    queue.wait_until_ready()
    return queue.enqueue, lambda: queue.dequeue(indefinite=True)


def stand_in(name: str, **contents: Any) -> None:
    """A module of vLLM with these names."""
    root = sys.modules.setdefault("vllm", types.ModuleType("vllm"))
    module = sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    vars(module).update(contents)
    setattr(root, name, module)


WAYS = {
    "unisono": unisono_queue,
    "vllm": vllm_queue,
    "multiprocessing": multiprocessing_queue,
    "zmq": zmq_pub,
}


def cpu_s() -> float:
    """The CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(way: str, rank: int, folder: str, queues: Any, results: Any, meeting: Any, given: Any) -> None:
    """One process."""
    put, get = WAYS[way](rank, given.readers + 1, folder, queues, given.vllm)
    time.sleep(1)  # a PUB socket does not know its subscribers
    row: dict[str, Any] = {}
    meeting.wait()
    before = cpu_s()
    if rank == 0:
        time.sleep(given.idle_s)
        put(-1)
    else:
        get()
    row["idle"] = (cpu_s() - before) / given.idle_s
    meeting.wait()
    before, began, taken = cpu_s(), time.monotonic(), []
    for i in range(given.messages):
        if rank == 0:
            time.sleep(max(0.0, began + i / 100 - time.monotonic()))
            put((i, time.monotonic()))
        else:
            number, sent = get()
            taken.append(time.monotonic() - sent)
            assert number == i
    row["busy"] = (cpu_s() - before) / (time.monotonic() - began)
    row["latency"] = taken
    array, row["large"] = np.ones(given.large_bytes // 8), []
    for _ in range(given.rounds):
        meeting.wait()
        began = time.monotonic()
        if rank == 0:
            put(array)
        else:
            assert get()[0] == 1
        meeting.wait()
        row["large"].append(time.monotonic() - began)
    results.put((rank, row))
    meeting.wait()


def run(way: str, given: Any) -> dict[str, float]:
    """All processes of a way, and what they found."""
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue() for _ in range(given.readers + 1)]
    results, meeting = context.Queue(), context.Barrier(given.readers + 1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, queues, results, meeting, given)
        processes = [
            context.Process(target=measure, args=(way, rank, *arguments)) for rank in range(given.readers + 1)
        ]
        for each in processes:
            each.start()
        rows = dict(results.get(timeout=600) for _ in processes)
        for each in processes:
            each.join(60)
    latency = [each for rank, row in rows.items() if rank for each in row["latency"]]
    percent = statistics.quantiles(latency, n=100)
    readers = [row for rank, row in rows.items() if rank]
    return {
        "p50 us": percent[49] * 1e6,
        "p99 us": percent[98] * 1e6,
        "reader idle CPU s/s": statistics.mean(row["idle"] for row in readers),
        "reader busy CPU s/s": statistics.mean(row["busy"] for row in readers),
        "writer busy CPU s/s": rows[0]["busy"],
        "large message s": min(rows[0]["large"]),
    }


def main() -> None:
    """Print a table; with --json one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--idle-s", type=float, default=15.0)
    parser.add_argument("--large-bytes", type=int, default=200_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", default="", help="the file of vLLM's MessageQueue")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not importlib.util.find_spec("zmq"):
        given.ways = [way for way in given.ways if way not in ("zmq", "vllm")]
    if not given.vllm:
        given.ways = [way for way in given.ways if way != "vllm"]
    for i, way in enumerate(given.ways):
        found = run(way, given)
        if given.json:
            print(json.dumps({"way": way, **found}), flush=True)
            continue
        if i == 0:
            print(f"{'':16}", *(f"{name:>20}" for name in found))
        print(f"{way:16}", *(f"{value:20.5g}" for value in found.values()), flush=True)


if __name__ == "__main__":
    main()
