"""Ranks that Ray starts, one of which fails: the driver reads that one's error. Run by test_replace.py.

Two actors that make a group, then Ray Train with Unisono as its backend.
"""

import sys
import time
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from unisono.errors import Aborted, PeerLost

LIMIT_S = 100.0


@ray.remote(num_cpus=1, max_concurrency=2)
class Trainer:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def train(self, address: str, how: str) -> None:
        import os

        import torch
        import torch.distributed as dist

        dist.init_process_group("unisono", init_method=address, rank=self.rank, world_size=2)
        for step in range(100):
            if self.rank == 1 and step == 5:
                if how == "raise":
                    raise ValueError("bad loss")
                os._exit(3)
            dist.all_reduce(torch.ones(10))

    def leave(self, *, below_a_call: bool) -> None:
        """In another thread than the one that trains, as Ray Train does it."""
        import torch.distributed as dist

        end = time.monotonic() + LIMIT_S
        while below_a_call and dist.group.WORLD._group.last_seen(self.rank) != "in all_reduce #6":
            assert time.monotonic() < end, "no call is made"
            time.sleep(0.01)
        dist.destroy_process_group()


def raised(kind: type[Exception], refs: list[ray.ObjectRef]) -> str:
    """What it says, as the driver reads it."""
    try:
        ray.get(refs, timeout=LIMIT_S)
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


def actors(folder: Path, attempts: int) -> None:
    """The driver reads the error of the rank that failed, and no rank reads its own number in its own."""
    waiting, failing = [Trainer.remote(rank) for rank in range(2)]
    for attempt in range(attempts):
        address = f"file://{folder}/{attempt}"
        trained = [actor.train.remote(address, "raise") for actor in (waiting, failing)]
        assert "bad loss" in raised(ValueError, trained)  # both processes live on
        ray.get(waiting.leave.remote(below_a_call=True), timeout=LIMIT_S)
        said = raised(Aborted, trained[:1])
        assert "all_reduce failed: this rank closed the group during the call" in said, said
        ray.get(failing.leave.remote(below_a_call=False), timeout=LIMIT_S)
    trained = [actor.train.remote(f"file://{folder}/last", "end") for actor in (waiting, failing)]
    said = raised(PeerLost, trained[:1])
    assert "all_reduce failed: rank 1 " in said, said
    for actor in (waiting, failing):
        ray.kill(actor)


def train() -> None:
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model

    assert type(dist.group.WORLD).__name__ == "ProcessGroupUnisono", dist.group.WORLD
    net = prepare_model(torch.nn.Linear(4, 1))
    for step in range(10):
        if dist.get_rank() == 1 and step == 5:
            raise ValueError("bad loss")
        net(torch.randn(8, 4)).square().mean().backward()


def trainer(folder: Path) -> None:
    """With a backend of the name unisono."""
    try:
        TorchTrainer(
            train,
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=TorchConfig(backend="unisono"),
            run_config=RunConfig(storage_path=str(folder)),
        ).fit()
    except Exception as error:
        said = str(error)
        assert "ValueError: bad loss" in said, error
        assert "PeerLost" not in said, error
        assert "Aborted" not in said, error
    else:
        raise AssertionError("nothing was raised")


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 1024 * 1024)
    folder = Path(sys.argv[1])
    actors(folder, int(sys.argv[2]))
    trainer(folder)
    print("fine")


if __name__ == "__main__":
    main()
