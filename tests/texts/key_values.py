"""Key-value stores and Python objects. `key_values.py NAME`."""

import os
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from told import of_all, say

import unisono as un
import unisono.torch


def kinds() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = (un.TCPStore("127.0.0.1", 0, is_server=True), un.FileStore(Path(folder, "f")), un.HashStore())
        for store in made:
            with store:
                store.set("key", "value")
                assert store.get("key") == b"value"
                assert [store.add("count", 1), store.add("count", 5)] == [1, 6]
                assert store.compare_set("key", "value", "other") == b"other"
                later = threading.Timer(0.1, store.set, ("late", "1"))
                later.start()
                store.wait(["late"], timedelta(seconds=30))
                assert store.check(["late"])
                later.join()
                say(type(store).__name__, store.get("key").decode(), store.get("count").decode())
    threads()


def threads() -> None:
    """A HashStore is the meeting place of two threads of one process."""
    store, found = un.HashStore(), [0, 0]

    def rank(number: int) -> None:
        with un.init_process_group(store=store, rank=number, world_size=2) as world:
            found[number] = world.all_reduce(number + 1)

    started = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for one in started:
        one.start()
    for one in started:
        one.join()
    say("threads", found)


def like_a_dict() -> None:
    with un.HashStore() as store:
        store["b"], store["a"] = "2", "1"
        assert "a" in store
        assert "c" not in store
        say(sorted(store.keys()), len(store), dict(store))
        del store["a"]
        say(list(store))


def both_ways() -> None:
    """Each interface takes the other's store objects."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    theirs = dist.TCPStore(host, port, size, rank == 0)
    with un.init_process_group(store=theirs, rank=rank, world_size=size) as world:
        say("unisono over PyTorch's TCPStore", world.all_reduce(rank + 1))
        folder = world.broadcast_object(tempfile.mkdtemp() if rank == 0 else None)
        ours = unisono.torch.Store(un.FileStore(Path(folder, "store"), size))
        dist.init_process_group("unisono", store=ours, rank=rank, world_size=size)
        x = torch.tensor([rank + 1])
        dist.all_reduce(x)
        say("torch.distributed over Unisono's FileStore", x.item())
        dist.destroy_process_group()
        world.barrier()


def objects() -> None:
    with un.init_process_group() as world:
        rank, size = world.rank, world.size
        say("broadcast", world.broadcast_object({"lr": 0.1} if rank == 0 else None))
        say("reduce", world.reduce_object([rank], un.SUM, dst=0))
        say("all_reduce", world.all_reduce_object({rank}, un.BOR))
        say("gather", world.gather_object(f"rank {rank}", dst=0))
        part = world.scatter_object([n * n for n in range(size)] if rank == 0 else None)
        say("scatter", world.all_gather_object(part))
        world.barrier()
    dist.init_process_group("unisono")
    words = [("from", 0)] if rank == 0 else [None]
    dist.broadcast_object_list(words)
    parts = [None]
    dist.scatter_object_list(parts, [["part", n] for n in range(size)] if rank == 0 else None)
    say("torch.distributed", of_all([words[0], parts[0]])[1])


def messages() -> None:
    dist.init_process_group("unisono")
    x = torch.zeros(3)
    if dist.get_rank() == 0:
        dist.send(torch.tensor([1.0, 2.0, 3.0]), dst=1)
        dist.recv(x, src=1)
    else:
        dist.recv(x, src=0)
        dist.send(2 * x, dst=0)
    say(x.tolist())
    dist.barrier()


def operations() -> None:
    dist.init_process_group("unisono")
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"):
        x = torch.tensor([dist.get_rank() + 2])
        dist.all_reduce(x if name != "AVG" else (x := x.double()), getattr(dist.ReduceOp, name))
        say(name, x.item())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
