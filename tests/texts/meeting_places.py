"""How ranks meet: init methods, interfaces, the log, backends, refusals. `meeting_places.py NAME`."""

import multiprocessing as mp
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.multiprocessing
from told import of_all, refusal, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as un
from unisono.engine.bootstrap.interfaces import interfaces


def by_hand(target: Any, *words: Any) -> None:
    """Two processes without a launcher call `target(rank, 2, *words)`; if one fails, the other is ended."""
    torch.multiprocessing.spawn(target, (2, *words), nprocs=2)


def free_port() -> int:
    with un.TCPStore("127.0.0.1", 0, is_server=True) as taken:
        return taken.port


def meet(rank: int, ranks: int, url: str, where: str) -> None:
    """Both interfaces meet at one kind of URL, each at a place of its own."""
    with un.init_process_group(init_method=url, rank=rank, world_size=ranks) as world:
        total = world.all_reduce(rank + 1)
    dist.init_process_group("unisono", init_method=where, rank=rank, world_size=ranks)
    x = torch.tensor([rank + 1])
    dist.all_reduce(x)
    assert total == x.item() == 3
    if rank == 0:
        say(f"{url.partition(':')[0]}: {total}, {x.item()}")
    dist.destroy_process_group()


def tcp() -> None:
    by_hand(meet, *(f"tcp://127.0.0.1:{free_port()}" for _ in range(2)))


def file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        by_hand(meet, f"file://{folder}/ours", f"file://{folder}/pytorch")
    say(refusal(lambda: un.init_process_group(init_method="file:///no/such/folder/f", rank=0, world_size=2),
                un.RendezvousError, ValueError, un.StoreError))  # fmt: skip


def left_behind(rank: int, ranks: int, url: str) -> None:
    dist.init_process_group("unisono", init_method=url, rank=rank, world_size=ranks)
    x = torch.tensor([rank + 1])
    dist.all_reduce(x)
    assert x.item() == 3
    os._exit(0)  # the group is not destroyed, the file stays


def used_file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            by_hand(left_behind, f"file://{folder}/meeting")
            assert Path(folder, "meeting").exists()
    say("the second job met at the file of the first")


def windows_names() -> None:
    for url in ("file://machine/share/f", "file:///d:/tmp/f"):
        say(refusal(lambda url=url: un.init_process_group(init_method=url, rank=0, world_size=2),
                    un.RendezvousError, ValueError, un.StoreError))  # fmt: skip


def met_by_environment(rank: int, ranks: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
    with un.init_process_group(init_method="env://", world_size=ranks) as world:  # the other two as arguments
        say("sum", world.all_reduce(rank + 1))


def env() -> None:
    by_hand(met_by_environment, free_port())
    say(refusal(lambda: un.init_process_group(init_method="env://"), un.RendezvousError).partition(",")[2])


def names() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    how = {"timeout": timedelta(seconds=60), "world_size": size, "rank": rank, "group_name": "mine"}
    with un.init_process_group("native", "env://", **how) as group:
        say(group.name, group.timeout_s)
        group.barrier()
    dist.init_process_group("unisono", "env://", **how)
    say(dist.get_world_size())
    with un.HashStore() as store:
        say(refusal(lambda: un.init_process_group(init_method="env://", store=store), ValueError))


def multicast() -> None:
    began = time.monotonic()
    text = refusal(lambda: un.init_process_group(init_method="tcp://224.1.1.1:29500", rank=0, world_size=2),
                   un.RendezvousError, ValueError)  # fmt: skip
    assert time.monotonic() - began < 30  # of 300
    say(text)


def fails(rank: int, ranks: int, port: int) -> None:
    world = un.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    if rank == 1:
        try:
            raise ValueError("bad batch")
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its traceback is not of interest
    began = time.monotonic()
    text = refusal(world.barrier, un.PeerLost)
    assert time.monotonic() - began < 60  # of 300
    assert "rank 1" in text
    assert "ValueError: bad batch" in text
    say("rank 0 stopped, and names rank 1 and its ValueError")


def one_fails() -> None:
    port = free_port()
    spawned = mp.get_context("spawn")
    started = [spawned.Process(target=fails, args=(rank, 2, port)) for rank in range(2)]
    for one in started:
        one.start()
    for one in started:
        one.join()
    assert [one.exitcode for one in started] == [0, 1]


def one_interface() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
    text = refusal(un.init_process_group, un.RendezvousError)
    assert all(each.name in text for each in interfaces()), text
    say(text.partition(".")[0])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with un.init_process_group() as world:
        world.all_reduce(np.ones(1 << 18))
        assert connections() == {"127.0.0.1"}
    say("only lo")


def all_interfaces() -> None:
    """Between four 'hosts' the pairs of ranks are spread over the interfaces."""
    used = {each.name: each.address for each in reversed(interfaces()) if "." in each.address}
    os.environ["NCCL_SOCKET_IFNAME"] = ",".join(f"={name}" for name in used)
    with un.init_process_group() as world:
        world.all_to_all(np.ones((world.size, 1 << 16)))
        found = set().union(*world.all_gather_object(connections()))
        assert found >= set(used.values()), (found, used)
    say("connections on every interface")


def connections() -> set[str]:
    """The local addresses of this process's TCP connections."""
    links = Path("/proc/self/fd").iterdir()
    own = {os.readlink(link) for link in links if link.is_symlink()}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    here = [row[1][:8] for row in rows if f"socket:[{row[9]}]" in own and row[3] == "01"]  # ESTABLISHED
    return {".".join(str(byte) for byte in bytes.fromhex(address)[::-1]) for address in here}


def mesh() -> None:
    """Rank 0 has collected the addresses; then every pair of ranks on different hosts is connected."""
    with un.init_process_group() as world:
        x = np.array([world.rank])
        for peer in range(world.size):
            out = np.empty_like(x)
            world.sendrecv(x, (world.rank + peer) % world.size, out, (world.rank - peer) % world.size)
            assert out[0] == (world.rank - peer) % world.size
        hosts = [world.host_of(rank) for rank in range(world.size)]
        assert len(set(hosts)) == world.size
    say("messages between all pairs of", len(hosts), "hosts")


def log() -> None:
    with un.init_process_group() as world:
        world.all_reduce(np.ones(4, np.float32))


def available() -> None:
    say({name: un.is_available(name) for name in ("native", "auto", "gloo")}, dist.is_available())
    assert un.is_available("nccl") == torch.cuda.is_available()


def automatic() -> None:
    with un.init_process_group("auto") as world:
        say("sum", world.all_reduce(world.rank + 1))


def gloo_on_gpus() -> None:
    """What a script does whose backend is changed from "nccl" to "gloo"."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    x = torch.full((2,), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    say("all_reduce", x.tolist())
    out = torch.zeros(1, device="cuda")
    dist.reduce_scatter(out, [torch.full((1,), rank + 1.0 + part, device="cuda") for part in range(2)])
    say("reduce_scatter", [each[0] for each in of_all(out.tolist())])
    say("DDP", trained(torch.device("cuda", rank)))


def over_mpi() -> None:
    dist.init_process_group("unisono-mpi")
    os.environ["RANK"] = str(dist.get_rank())
    x = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(x)
    say("all_reduce", x.tolist())
    say("DDP", trained(torch.device("cpu")))
    dist.destroy_process_group()


def trained(device: torch.device) -> str:
    """Three steps of DDP beside three steps of one process with all rows."""
    torch.manual_seed(0)
    alone, own = nn.Linear(8, 4), nn.Linear(8, 4)
    own.load_state_dict(alone.state_dict())
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(own.to(device), device_ids=[device] if device.type == "cuda" else None)
    for model, rows in ((alone, slice(None)), (ddp, slice(rank, None, size))):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            at = next(model.parameters()).device
            nn.functional.mse_loss(model(x[rows].to(at)), y[rows].to(at)).backward()
            optimizer.step()
    torch.testing.assert_close(own.weight.cpu(), alone.weight, rtol=0, atol=1e-6)
    return "has the weights of one process"


def rpc_of_pytorch() -> None:
    rpc.init_rpc("worker", rank=0, world_size=1)
    say(rpc.rpc_sync("worker", torch.add, (torch.ones(2), 1)).tolist())
    rpc.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
