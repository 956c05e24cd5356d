"""Arrays from one job to another: 1 GB from 4 ranks to 2, each of which takes half; beside a plain copy.

    python benchmarks/publish.py
    python benchmarks/publish.py --between-hosts           # every rank counts as a host: over sockets

Ways, each in processes of its own, one after another:

    copy      2 processes copy the same cut each, out of memory that they map: what the machine can do
    sockets   the same bytes over 8 connections of this host, 4 senders, 2 receivers (--between-hosts)
    unisono   `un.publish` and `un.subscribe`: 4 ranks have rows, 2 take half of all rows (--columns: columns)
    files     the publishers write their pieces to /dev/shm, the others read what they want
    gloo      torch.distributed: one group of all 6 ranks, each piece is broadcast from its rank

Each row: GB/s of the taking (best and median of `--rounds`), and the milliseconds of publishing before it:
`update`, writing the files. What takes its bytes while they are published (gloo) has no such time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SENDERS, TAKERS, COLUMNS, ARRAYS = 4, 2, 4096, 8


class Place(NamedTuple):
    """A process. rank: of its job. rows: of each array."""

    publishes: bool
    rank: int
    rows: int
    folder: str
    by_rows: bool

    @property
    def mine(self) -> list[np.ndarray[Any, Any]]:
        """A publisher's rows of each array, with values of their own."""
        each = self.rows // SENDERS
        return [np.full((each, COLUMNS), number * 10 + self.rank, np.float32) for number in range(ARRAYS)]

    @property
    def half(self) -> tuple[slice, slice]:
        """What a taker wants of each array."""
        size = self.rows if self.by_rows else COLUMNS
        part = slice(self.rank * size // TAKERS, (self.rank + 1) * size // TAKERS)
        return (part, slice(None)) if self.by_rows else (slice(None), part)


Step = Callable[[], Any]
"""Called in each round; a taker's returns its arrays."""


def unisono_way(at: Place) -> tuple[Step, Step]:
    """Publish in the first half of a round, take in the second."""
    import unisono as un

    side = "publishers" if at.publishes else "takers"
    size = SENDERS if at.publishes else TAKERS
    group = un.init_process_group(init_method=f"file://{at.folder}/{side}", rank=at.rank, world_size=size)
    told = Path(at.folder) / "address"
    if at.publishes:
        each = at.rows // SENDERS
        arrays = {
            f"w{number}": un.Piece(mine, (at.rank * each, 0), (at.rows, COLUMNS))
            for number, mine in enumerate(at.mine)
        }
        publication = un.publish("weights", arrays, group=group)
        if at.rank == 0:
            told.with_suffix(".new").write_text(publication.address)
            told.with_suffix(".new").rename(told)
        return publication.update, lambda: group
    while not told.exists():
        time.sleep(0.01)
    cut = {"*": 0 if at.by_rows else 1}
    subscription = un.subscribe(told.read_text(), "weights", cut=cut, group=group)
    return lambda: None, lambda: list(subscription.get()[1].values())


def files_way(at: Place) -> tuple[Step, Step]:
    """Files in /dev/shm; a reader maps them and copies its part."""
    names = [f"/dev/shm/{Path(at.folder).name}-{rank}" for rank in range(SENDERS)]
    if at.publishes:
        mine = np.stack(at.mine)
        return lambda: mine.tofile(names[at.rank]), lambda: None
    rows, each = at.half[0], at.rows // SENDERS
    wide = COLUMNS if at.by_rows else COLUMNS // TAKERS
    out = np.zeros((ARRAYS, rows.stop - rows.start if at.by_rows else at.rows, wide), np.float32)

    def take() -> Any:
        for rank, name in enumerate(names):
            there = np.memmap(name, np.float32, "r", shape=(ARRAYS, each, COLUMNS))
            first = rank * each - (rows.start or 0)
            if 0 <= first < out.shape[1]:
                out[:, first : first + each] = there[:, :, at.half[1]]
        return list(out)

    return lambda: None, take


def gloo_way(at: Place) -> tuple[Step, Step]:
    """Each piece goes from its rank to all; a taker keeps its part, in memory that it has."""
    import torch
    import torch.distributed as dist

    rank = at.rank if at.publishes else SENDERS + at.rank
    dist.init_process_group(
        "gloo", init_method=f"file://{at.folder}/gloo", rank=rank, world_size=SENDERS + TAKERS
    )
    each = at.rows // SENDERS
    mine = [torch.from_numpy(one) for one in at.mine] if at.publishes else []
    room = torch.empty(each, COLUMNS)
    rows = at.half[0] if not at.publishes and at.by_rows else slice(0, at.rows)
    wide = COLUMNS if at.by_rows else COLUMNS // TAKERS
    out = np.zeros((ARRAYS, rows.stop - rows.start, wide), np.float32)

    def move() -> Any:
        for number in range(ARRAYS):
            for source in range(SENDERS):
                dist.broadcast(mine[number] if source == rank else room, source)
                first = source * each - rows.start
                if not at.publishes and 0 <= first < out.shape[1]:
                    out[number, first : first + each] = room.numpy()[:, at.half[1]]
        return list(out)

    return lambda: None, move


def copy_way(at: Place) -> tuple[Step, Step]:
    """What a taker wants is in memory that it maps: one copy."""
    if at.publishes:
        return lambda: None, lambda: None
    memory = SharedMemory(create=True, size=ARRAYS * at.rows * COLUMNS * 4)
    there = np.ndarray((ARRAYS, at.rows, COLUMNS), np.float32, memory.buf)
    there[:] = 1
    memory.unlink()
    parts = [one[at.half] for one in there]
    out = [np.zeros(part.shape, np.float32) for part in parts]

    def take(kept: Any = memory) -> Any:  # noqa: ARG001  (the memory lives as long as this)
        for into, part in zip(out, parts, strict=True):
            np.copyto(into, part)
        return out

    return lambda: None, take


def sockets_way(at: Place) -> tuple[Step, Step]:
    """A connection of each publisher to each taker, nothing else."""
    share = ARRAYS * at.rows * COLUMNS * 4 // (SENDERS * TAKERS)
    if at.publishes:
        data, ends = np.ones(share, np.uint8), []
        for taker in range(TAKERS):
            port = Path(at.folder) / f"port-{taker}"
            while not port.exists():
                time.sleep(0.01)
            ends.append(socket.create_connection(("127.0.0.1", int(port.read_text()))))
        return lambda: None, lambda: in_threads([lambda end=end: end.sendall(data) for end in ends])
    listener = socket.create_server(("127.0.0.1", 0))
    port = Path(at.folder) / f"port-{at.rank}"
    port.with_suffix(".new").write_text(str(listener.getsockname()[1]))
    port.with_suffix(".new").rename(port)
    ends = [listener.accept()[0] for _ in range(SENDERS)]
    rooms = [np.zeros(share, np.uint8) for _ in ends]

    def take() -> Any:
        in_threads([lambda e=e, r=r: receive(e, r) for e, r in zip(ends, rooms, strict=True)])
        return rooms

    return lambda: None, take


def receive(end: socket.socket, room: Any) -> None:
    """Fill `room`."""
    at = 0
    while at < room.size:
        at += end.recv_into(room[at:])


def in_threads(acts: list[Callable[[], Any]]) -> None:
    """Do all at the same time."""
    threads = [threading.Thread(target=act) for act in acts]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


WAYS = {
    "copy": copy_way,
    "sockets": sockets_way,
    "unisono": unisono_way,
    "files": files_way,
    "gloo": gloo_way,
}


def process(way: str, at: Place, rounds: int, together: Any, times: Any) -> None:
    """One process: `rounds` times publish, meet, take, meet."""
    publish, take = WAYS[way](at)
    for number in range(rounds):
        together.wait()
        began = time.perf_counter()
        publish()
        published = time.perf_counter()
        together.wait()
        middle = time.perf_counter()
        got = take()
        ended = time.perf_counter()
        if not at.publishes and way in ("unisono", "files", "gloo"):
            check(at, got)
        together.wait()
        times.put(
            (number, published - began if at.publishes else 0.0, 0.0 if at.publishes else ended - middle)
        )
    times.close()
    times.join_thread()
    together.wait()
    os._exit(0)  # no time for farewells


def check(at: Place, got: list[Any]) -> None:
    """Each array has the rows of each publisher."""
    for number, one in enumerate(got):
        rows = np.repeat(number * 10 + np.arange(SENDERS), at.rows // SENDERS)[at.half[0]]
        assert (one[:, 0] == rows).all(), number
        assert (one[:, -1] == rows).all(), number


def measure(way: str, rows: int, rounds: int, by_rows: bool) -> dict[str, Any]:
    """The times of one way; that of a round is the slowest process's."""
    context = multiprocessing.get_context("spawn")
    together, times = context.Barrier(SENDERS + TAKERS), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        places = [Place(True, rank, rows, folder, by_rows) for rank in range(SENDERS)]
        places += [Place(False, rank, rows, folder, by_rows) for rank in range(TAKERS)]
        started = [context.Process(target=process, args=(way, at, rounds, together, times)) for at in places]
        for one in started:
            one.start()
        told = [times.get(timeout=300) for _ in range(rounds * len(places))]
        for one in started:
            one.join(10)
        for rank in range(SENDERS):
            Path(f"/dev/shm/{Path(folder).name}-{rank}").unlink(missing_ok=True)
    taken = [max(took for at, _, took in told if at == number) for number in range(1, rounds)]
    published = [max(took for at, took, _ in told if at == number) for number in range(1, rounds)]
    nbytes = ARRAYS * rows * COLUMNS * 4
    return {
        "way": way,
        "best_GBps": round(nbytes / min(taken) / 1e9, 2),
        "median_GBps": round(nbytes / statistics.median(taken) / 1e9, 2),
        "publish_ms": round(statistics.median(published) * 1e3, 1),
    }


def main() -> None:
    """Measure all ways, print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0, help="of all arrays together")
    parser.add_argument("--rounds", type=int, default=8, help="the first one is not counted")
    parser.add_argument("--columns", action="store_true", help="takers want columns, across all pieces")
    parser.add_argument("--between-hosts", action="store_true")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[])
    given = parser.parse_args()
    if given.between_hosts:
        os.environ["UNISONO_RANKS_PER_HOST"] = "1"
    reference = "sockets" if given.between_hosts else "copy"
    ways = given.ways or [reference, "unisono", "gloo", *([] if given.between_hosts else ["files"])]
    step = SENDERS * TAKERS
    rows = max(step, round(given.gb * 1e9 / (ARRAYS * COLUMNS * 4)) // step * step)
    found = [measure(way, rows, given.rounds, not given.columns) for way in ways]
    rate = next((one["median_GBps"] for one in found if one["way"] == reference), None)
    for one in found:
        share = f", {one['median_GBps'] / rate:.0%} of {reference}" if rate else ""
        print(
            f"{one['way']:8} {one['best_GBps']:6.2f} GB/s best, {one['median_GBps']:6.2f} median{share}; "
            f"published in {one['publish_ms']:.0f} ms"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
