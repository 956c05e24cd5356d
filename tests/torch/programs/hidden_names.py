"""Two ranks use PyTorch while one of its private names is hidden. Prints what each feature said, as JSON.

Imports PyTorch once. Each rank is a fork that hides a name, then imports Unisono.
Arguments: a folder, then the names' paths.
"""

import contextlib
import importlib
import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "support"))

from fork_server import IMPORTED_ONCE, wait

SIZE = 2


def collectives() -> None:
    import torch
    import torch.distributed as dist

    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [SIZE] * 3
    dist.all_reduce(x, async_op=True).wait()
    dist.barrier(group=dist.new_group([0, 1]))
    dist.broadcast(x, 0, async_op=True).get_future().wait()


def premultiplied() -> None:
    import torch
    import torch.distributed as dist

    x = torch.ones(2)
    dist.all_reduce(x, dist._make_nccl_premul_sum(3.0))
    assert x.tolist() == [3.0 * SIZE] * 2


def ddp() -> None:
    import torch
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    model(torch.ones(1, 2)).sum().backward()


def profiled() -> None:
    import torch
    import torch.distributed as dist

    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(2))
    assert profile.key_averages()


def hooked() -> None:
    import torch
    import torch.distributed as dist

    seen: list[Any] = []
    dist.group.WORLD.register_pre_hook(1, seen.append)
    dist.all_reduce(torch.ones(2))
    assert seen


def trained(**plan: Any) -> None:
    import torch
    from torch import nn

    import unisono.parallel as up

    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    run = up.parallelize(
        model,
        up.Plan(**plan),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.001),
        loss=nn.functional.mse_loss,
    )
    losses = [run.step((torch.ones(4, 4), torch.zeros(4, 4))) for _ in range(2)]
    assert losses[1] < losses[0]


FEATURES: dict[str, Any] = {
    "collectives": collectives,
    "PREMUL_SUM": premultiplied,
    "DDP": ddp,
    "profiler": profiled,
    "hooks": hooked,
    "zero 0": lambda: trained(data=2, clip=1.0),
    "zero 2": lambda: trained(data=2, zero=2, recompute=True, uneven_use=True),
    "bf16": lambda: trained(data=2, precision="bf16"),
    "pipeline": lambda: trained(pipeline=2, micro_batches=2, schedule="zb-h1"),
}


def main(folder: Path, paths: list[str]) -> None:
    for name in filter(lambda name: name.startswith("torch"), IMPORTED_ONCE):
        importlib.import_module(name)
    for path in paths:
        here = folder / path.replace(":", ".")
        here.mkdir()
        codes = wait([fork(rank, here, path) for rank in range(SIZE)], 60, 10)
        said = [json.loads(each.read_text()) for each in sorted(here.glob("*.json"))]
        print(json.dumps({"path": path, "codes": codes, "said": said}), flush=True)


def fork(rank: int, folder: Path, path: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        (folder / f"{rank}.json").write_text(json.dumps(tried(rank, folder, path)))
        code = 0
    finally:
        os._exit(code)


def tried(rank: int, folder: Path, path: str) -> dict[str, str]:
    """What each feature says: "works", or its error. "import" and "init" are features, too."""
    from unisono import torch_internals
    from unisono.torch_internals import probe

    find = probe.find
    probe.find = torch_internals.find = lambda name: None if name.path == path else find(name)
    said: dict[str, str] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attempt(said, "import", lambda: importlib.import_module("unisono.torch"))
        attempt(said, "init", lambda: begin(rank, folder))
        for name, feature in FEATURES.items():
            if said["import"] == said["init"] == "works":
                attempt(said, name, feature)
    said["warnings"] = " ".join(str(each.message) for each in caught)
    return said


def begin(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), SIZE)
    dist.init_process_group(
        "unisono", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=300)
    )


def attempt(said: dict[str, str], name: str, feature: Any) -> None:
    said[name] = "works"
    try:
        feature()
    except BaseException as error:
        said[name] = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            error.__traceback__ = None


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
