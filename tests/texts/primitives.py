"""Collectives: on CUDA tensors over "nccl" (virtual GPUs), and on NumPy arrays. `primitives.py NAME`."""

import functools
import os
import sys
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from told import of_all, say

import unisono as un


def nccl() -> tuple[int, int]:
    """Join the group with the GPU of this rank; the rank and the number of ranks."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    return dist.get_rank(), dist.get_world_size()


def mine(rank: int) -> torch.Tensor:
    return torch.tensor([rank + 1, 2 * rank + 2]).cuda()


def eight() -> None:
    rank, size = nccl()
    x = mine(rank)
    dist.broadcast(x, src=1)
    say("broadcast", of_all(x.tolist()))
    x = mine(rank)
    dist.reduce(x, dst=2)
    say("reduce", of_all(x.tolist())[2])
    x = mine(rank)
    dist.all_reduce(x)
    say("all_reduce", of_all(x.tolist()))
    parts = [torch.zeros_like(x) for _ in range(size)]
    dist.gather(mine(rank), parts if rank == 0 else None, dst=0)
    say("gather", [part.tolist() for part in parts])
    parts = [torch.zeros_like(x) for _ in range(size)]
    dist.all_gather(parts, mine(rank))
    say("all_gather", of_all([part.tolist() for part in parts])[2])
    dist.scatter(x, [mine(r) for r in range(size)] if rank == 0 else None, src=0)
    say("scatter", of_all(x.tolist()))
    dist.reduce_scatter(x, [mine(rank) + part for part in range(size)])
    say("reduce_scatter", of_all(x.tolist()))
    dist.barrier()
    say("barrier")


def powers() -> None:
    """Part i is the (i+1)th power of the rank's pair: rank i gets the sum of these powers."""
    rank, size = nccl()
    pair = torch.tensor([rank + 1, 2 * rank + 2]).cuda()
    out = torch.zeros_like(pair)
    dist.reduce_scatter(out, [pair ** (part + 1) for part in range(size)])
    say(of_all(out.tolist()))


def two_halves() -> None:
    with un.init_process_group(reproducible=True) as world:
        x = np.random.default_rng(world.rank).standard_normal(3 * 1000)
        halves = world.all_gather(world.reduce_scatter(x)).reshape(-1)
        world.all_reduce(x)
        assert halves.tobytes() == x.tobytes()
    say("the same bits")


def roots() -> None:
    with un.init_process_group() as world:
        values = [np.random.default_rng(rank).integers(100, size=(4, 8)) for rank in range(world.size)]
        own, total = values[world.rank], functools.reduce(np.add, values)
        for root in range(world.size):
            at_root = world.rank == root
            x = own.copy()
            world.broadcast(x, src=root)
            assert (x == values[root]).all()
            x = own.copy()
            world.reduce(x, dst=root)
            assert (x == (total if at_root else own)).all()
            rows = world.gather(own, dst=root)
            assert rows is None if not at_root else (rows == values).all()
            row = np.empty(8, own.dtype)
            world.scatter(row, own if at_root else None, src=root)
            assert (row == values[root][world.rank]).all()
    say("roots 0 to 3")


def average() -> None:
    rank, _ = nccl()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        x = mine(rank).float()
        dist.all_reduce(x, op)
        say(of_all(x.tolist())[1])


def inverse() -> None:
    with un.init_process_group() as world:
        own = np.arange(3.0) + 10 * world.rank
        rows, back = world.gather(own), np.empty(3)
        world.scatter(back, rows)
        assert (back == own).all()
        whole = rows if world.rank == 0 else np.empty((world.size, 3))
        world.broadcast(whole)
        assert (whole == world.all_gather(own)).all()
        say(f"scatter leaves {back.nbytes} bytes on a rank, broadcast {whole.nbytes}")


def barrier() -> None:
    with un.init_process_group() as world:
        world.barrier()
        time.sleep(0.3 * world.rank)
        came = time.monotonic()  # of the host: all ranks read one clock
        world.barrier()
        left = time.monotonic()
        assert min(world.all_gather_object(left)) >= max(world.all_gather_object(came))
    say("nobody left before the last one came")


def quiet() -> None:
    """The same script as for real GPUs; what C++ would write goes to descriptor 2, too."""
    with tempfile.TemporaryFile("w+") as kept:
        own = os.dup(2)
        os.dup2(kept.fileno(), 2)
        rank, size = nccl()
        x = torch.full((4,), float(rank), device="cuda")
        dist.all_reduce(x)
        torch.histc(x, 2)
        os.dup2(own, 2)
        kept.seek(0)
        assert kept.read() == ""
    assert x.tolist() == [size * (size - 1) / 2] * 4
    say("no warning on", x.device)


def spawned(rank: int, size: int, port: int) -> None:
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    torch.cuda.set_device(rank)
    os.environ["RANK"] = str(rank)
    one = torch.full((2,), rank + 1, device="cuda")
    parts = [torch.zeros_like(one) for _ in range(size)]
    dist.all_gather(parts, one)
    say("all_gather", [part[0].item() for part in parts])
    total = one.clone()
    dist.all_reduce(total)
    say("all_reduce", total.tolist())
    total = one.clone()
    dist.reduce(total, dst=0)
    say("reduce", total.tolist())
    dist.reduce_scatter(total, [one * (part + 1) for part in range(size)])
    say("reduce_scatter", [each[0] for each in of_all(total.tolist())])
    dist.destroy_process_group()


def spawn() -> None:
    """One process starts the ranks, as scripts for a machine with four GPUs do."""
    if torch.cuda.device_count() < 4:
        sys.exit("this program needs four GPUs")
    with un.TCPStore("127.0.0.1", 0, is_server=True) as taken:
        port = taken.port
    mp.spawn(spawned, (4, port), nprocs=4)


def four_gpus() -> None:
    if torch.cuda.device_count() < 4:
        say("this program needs four GPUs, there are", torch.cuda.device_count())


def one_whole() -> None:
    """A list of one tensor of the whole size."""
    rank, size = nccl()
    out = torch.zeros(2, device="cuda")
    dist.reduce_scatter(out, [torch.full((2 * size,), rank + 1.0, device="cuda")])
    say(of_all(out.tolist()))


def ring_of_three() -> None:
    with un.init_process_group() as world:
        out = np.empty(1)
        world.sendrecv(np.array([float(world.rank)]), (world.rank + 1) % world.size, out)
        say(world.all_gather(out).ravel().tolist())
        world.barrier()


def prefixes() -> None:
    with un.init_process_group() as world:
        say("scan", world.all_gather_object(world.scan(world.rank + 1)))
        x = np.array([world.rank + 1.0])
        world.exclusive_scan(x)
        say("exclusive_scan", world.all_gather(x).ravel().tolist()[1:])
        say("all_to_all", world.all_to_all(np.arange(world.size) + 10 * world.rank).tolist())
        world.barrier()


def functions() -> None:
    """Reduction by a function: here a difference, which depends on the order, and the longest word."""
    with un.init_process_group() as world:
        matrix = np.array([[1.0, world.rank], [0.0, 1.0]])
        upper = np.array([(matrix,)], [("m", "f8", (2, 2))])

        def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            out = np.empty_like(a)
            out["m"] = a["m"] @ b["m"]
            return out

        world.all_reduce(upper, un.op(product, commutative=False))
        say("product of matrices", upper["m"][0].tolist())
        longest = world.all_reduce_object("x" * world.rank, un.op(lambda a, b: max(a, b, key=len)))
        say("longest", longest)


def subtraction() -> None:
    """x0 - x1 - x2 - x3: minus is not associative, so the first keeps its sign and the others change it."""
    with un.init_process_group() as world:
        x = np.array([[100.0, 7.0], [30.0, 1.0], [20.0, 2.0], [10.0, 3.0]][world.rank])
        expected = functools.reduce(np.subtract, world.all_gather(x))
        if world.rank:
            np.negative(x, out=x)
        world.all_reduce(x, un.op(np.add))
        assert (x == expected).all()
        say(x.tolist())


def joined() -> None:
    """Gather as a reduction whose function joins lists: what it combines grows."""
    with un.init_process_group() as world:
        join = un.op(lambda a, b: a + b)
        whole = world.reduce_object([world.rank] * (world.rank + 1), join, dst=0)
        say(whole)
        assert (whole is None) == (world.rank > 0)


def two_buffers() -> None:
    with un.init_process_group() as world:
        x, total = np.ones(2), np.empty(2)
        world.all_reduce(x, un.op(np.add), out=total, algorithm="ring")
        world.all_reduce(x * (world.rank + 1), out=total, algorithm="ring")
        say(x.tolist(), total.tolist())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
