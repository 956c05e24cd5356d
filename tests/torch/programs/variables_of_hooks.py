"""Two ranks with PyTorch's variables for the NaN check and the flight recorder. Run by suite.py."""

import os
import pickle
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import unisono.torch as ut


def main(rank: int, size: int, folder: Path, backend: str) -> None:
    os.environ.update(TORCH_DIST_NAN_CHECK="1", TORCH_FR_BUFFER_SIZE="100")
    if backend == "gloo":
        os.environ["UNISONO_REPLACE"] = "gloo"
        ut._register()
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [size] * 3
    for group in (dist.group.WORLD, dist.new_group()):
        try:
            dist.all_reduce(torch.tensor([1.0, float("nan")]), group=group)
            raise AssertionError("a NaN passed the check")
        except RuntimeError as error:
            assert "NaN" in str(error), error
    dist.barrier()
    dump = c10d._dump_fr_trace
    recorded = pickle.loads(dump(backend="unisono") if "backend" in dump.__doc__ else dump())
    names = [entry["profiling_name"].rpartition(":")[2] for entry in recorded["entries"]]
    assert names[0].replace("_", "") == "allreduce", names  # 2.14 writes it in one word
    assert "barrier" in names[-1], names
    assert recorded["entries"][0]["input_sizes"] == [[3]], recorded["entries"][0]
    dist.destroy_process_group()
    print("fine")
