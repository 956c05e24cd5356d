"""What Ray's ranks do in test_ray.py: `python ray_program.py CASE`. Prints what a user would see."""

import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

import unisono as un
import unisono.ray


def train(world: un.Group, factor: float) -> tuple[int, float, int]:
    x = np.full((3, 4), factor * (world.rank + 1), np.float32)
    world.all_reduce(x)
    return world.rank, float(x[2, 3]), os.getpid()


def run_case() -> None:
    results = unisono.ray.run(train, num_workers=4, args=(2.0,))
    print([(rank, value) for rank, value, _ in results], len({pid for _, _, pid in results}), "processes")
    print("free again:", wait_for_cpus(4))


def dies(world: un.Group) -> None:
    x = np.ones(4)
    world.all_reduce(x)
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        world.all_reduce(x)
    except un.PeerLost as error:
        Path(os.environ["CASE_FOLDER"], str(world.rank)).write_text(f"rank {world.rank} saw: {error}")
        raise


def dies_case() -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            unisono.ray.run(dies, num_workers=4, runtime_env={"env_vars": {"CASE_FOLDER": folder}})
        except un.PeerLost as error:
            print(f"driver: PeerLost, rank {error.rank}: {error}")
        print(*(path.read_text() for path in sorted(Path(folder).iterdir())), sep="\n")
    print("free again:", wait_for_cpus(4))


def fails(world: un.Group) -> None:
    if world.rank == 1:
        raise ValueError("label 10 is out of range")
    world.barrier()


def fails_case() -> None:
    try:
        unisono.ray.run(fails, num_workers=3)
    except ValueError as error:
        print(f"ValueError with {getattr(error, '__notes__', '')}: {str(error).splitlines()[-1]}")


@ray.remote(num_cpus=1)
class Learner:
    """An actor of a user, who makes the group."""

    def join(self, name: str, rank: int, size: int) -> None:
        self.world = unisono.ray.join(name, rank=rank, world_size=size, timeout=120)

    def ring(self) -> np.ndarray[Any, Any]:
        x = np.full((3, 4), self.world.rank + 1.0, np.float32)
        self.world.all_reduce(x, op=un.SUM, algorithm="ring")
        return x

    def lost(self) -> str:
        try:
            self.world.barrier()
        except un.PeerLost as error:
            return f"rank {error.rank} lost: {error}"
        return "nobody lost"

    def leave(self) -> None:
        self.world.close()


def actors_case() -> None:
    actors = [Learner.remote() for _ in range(4)]
    for _ in range(3):  # the name can be used again
        ray.get([actor.join.remote("learners", rank, 4) for rank, actor in enumerate(actors)])
        results = ray.get([actor.ring.remote() for actor in actors])
        print({(each.shape, float(each.min()), float(each.max())) for each in results})
        ray.get([actor.leave.remote() for actor in actors])
    ray.get([actor.join.remote("learners", rank, 4) for rank, actor in enumerate(actors)])
    ray.kill(actors[3])
    print(*ray.get([actor.lost.remote() for actor in actors[:3]]), sep="\n")
    ray.get([actor.leave.remote() for actor in actors[:3]])


def missing_case() -> None:
    try:
        ray.get(alone.remote())
    except un.RendezvousError as error:
        print(f"missing {error.missing}: {str(error).splitlines()[-1]}")


@ray.remote(num_cpus=1)
def alone() -> None:
    unisono.ray.join("alone", rank=1, world_size=2, timeout=2)


def resources_case() -> None:
    try:
        unisono.ray.run(train, num_workers=9, args=(1.0,), timeout=2)
    except un.RendezvousError as error:
        print(error)
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    ray.get(group.ready())
    print(len(unisono.ray.run(train, num_workers=2, args=(1.0,), placement_group=group)))
    print("the placement group is", ray.util.placement_group_table(group)["state"])
    for arguments in (
        {"num_workers": 3, "placement_group": group},
        {"num_workers": 2, "num_gpus": 1, "timeout": 2},
    ):
        try:
            unisono.ray.run(train, args=(1.0,), **arguments)
        except (ValueError, un.RendezvousError) as error:
            print(f"{type(error).__name__}: {error}")


def where(world: un.Group) -> str:
    x = np.ones(1 << 16)
    world.all_reduce(x)
    return f"rank {world.rank} on {socket.gethostname()}: {x[0]:g}"


def hosts_case() -> None:
    print(*unisono.ray.run(where, num_workers=4, placement_strategy="SPREAD"), sep="\n")


def nodes_case() -> None:
    print(len(ray.nodes()), "nodes")


def trainer_case() -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def loop() -> None:
        import torch
        import torch.distributed as dist

        x = torch.full((3, 4), dist.get_rank() + 1.0)
        dist.all_reduce(x)
        model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
        model(x).sum().backward()
        ray.train.report({"sum": x[0, 0].item(), "size": dist.get_world_size()})
        print("backend", dist.get_backend(), "sum", x[0, 0].item(), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            loop,
            torch_config=TorchConfig(backend="unisono"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        )
        print("result", trainer.fit().metrics)


def start(**options: Any) -> None:
    """Start Ray, or connect to it. Its parts have 15 s to begin: too few on a busy machine."""
    for left in reversed(range(5)):
        try:
            ray.init(**options, logging_level="warning")
            return
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def wait_for_cpus(count: float) -> bool:
    """Whether so many are free within 10 s: actors that were killed are gone."""
    for _ in range(100):
        if ray.available_resources().get("CPU", 0) >= count:
            return True
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    address = sys.argv[2] if len(sys.argv) > 2 else None
    with tempfile.TemporaryDirectory(prefix="u", dir="/tmp") as place:
        local = {
            "num_cpus": 4,
            "object_store_memory": 80 << 20,
            "include_dashboard": False,
            "_temp_dir": place,
        }
        start(**({"address": address} if address else local))
        try:
            globals()[f"{sys.argv[1]}_case"]()
        finally:
            ray.shutdown()
