"""What PyTorch's distributed checkpoints exchange beside the data, by number of ranks: seconds, CPU, memory.

    python benchmarks/coordination.py [--ranks 64 256 1000] [--backends unisono gloo] [--tensors 200]

Each rank has a plan of its writes, with a shard of each tensor. `save` is what a save does: the plans go to
rank 0 (`gather_object`), which makes the global one, and each rank gets its part (`scatter_object_list`).
`gather` and `scatter` are the two alone, `wait` an all_gather_object of one short object. All ranks are
forked from one process that has imported PyTorch, so that 1,000 fit. A figure is that of the slowest rank,
the median of the rounds; MiB: the peak of rank 0. UNISONO_RANKS_PER_HOST=8: every 8 ranks count as a host.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import mmap
import os
import pickle
import pkgutil
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

import unisono.engine
import unisono.torch
import unisono.torch_internals

WIDTH = 4096
WORK = ("start", "gather", "scatter", "save", "wait")
FIGURES = ("seconds", "cpu_s", "peak_mib")


def plan_of(rank: int, size: int, tensors: int) -> SavePlan:
    """What `create_default_local_save_plan` makes of parameters that FSDP2 has cut."""
    whole, part = torch.Size([size * 8, WIDTH]), torch.Size([8, WIDTH])
    begins = torch.Size([8 * rank, 0])
    chunk = ChunkStorageMetadata(begins, part)
    return SavePlan(
        [
            WriteItem(
                MetadataIndex(f"model.layers.{number // 8}.block{number % 8}.weight", begins),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(), whole),
            )
            for number in range(tensors)
        ]
    )


def gather(plan: SavePlan, rank: int, size: int) -> list[SavePlan] | None:
    plans = [None] * size if rank == 0 else None
    dist.gather_object(plan, plans)
    return plans


def scatter(plans: list[SavePlan] | None) -> SavePlan:
    mine: list[SavePlan] = [None]  # type: ignore[list-item]
    dist.scatter_object_list(mine, plans)
    return mine[0]


def live(
    rank: int, size: int, backend: str, meeting: str, arguments: argparse.Namespace, found: np.ndarray
) -> None:
    """A rank: fills its figures, by round, work and figure."""
    plan = plan_of(rank, size, arguments.tensors)
    plans = [plan_of(each, size, arguments.tensors) for each in range(size)] if rank == 0 else None

    def save() -> None:
        plans = gather(plan, rank, size)
        mine = scatter(plans and [replace(each, storage_data=number) for number, each in enumerate(plans)])
        assert mine.storage_data == rank
        assert mine.items == plan.items

    def start() -> None:
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size)
        dist.barrier()

    work: dict[str, Callable[[], object]] = {
        "start": start,
        "gather": lambda: gather(plan, rank, size),
        "scatter": lambda: scatter(plans),
        "save": save,
        "wait": lambda: dist.all_gather_object([None] * size, rank),
    }
    for number in range(arguments.rounds):
        for place, name in enumerate(WORK):
            if name == "start" and number:
                continue
            if name != "start":
                dist.barrier()
            began, cpu = time.monotonic(), time.process_time()
            work[name]()
            found[number, place] = time.monotonic() - began, time.process_time() - cpu, peak_mib()
    dist.barrier()
    dist.destroy_process_group()


def load_all() -> None:
    """Load what the ranks would each load for themselves."""
    for package in (unisono.engine, unisono.torch, unisono.torch_internals):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            with suppress(ModuleNotFoundError):  # of another library
                importlib.import_module(module.name)


def peak_mib() -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def job(size: int, backend: str, arguments: argparse.Namespace) -> np.ndarray | None:
    """One job: its figures by rank, round, work, figure; None where a rank failed."""
    shape = (size, arguments.rounds, len(WORK), len(FIGURES))
    found = np.frombuffer(mmap.mmap(-1, 8 * int(np.prod(shape)))).reshape(shape)
    pids = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    live(rank, size, backend, f"file://{folder}/meeting", arguments, found[rank])
                    code = 0
                except BaseException:  # noqa: BLE001 (the parent sees the code)
                    traceback.print_exc()
                finally:
                    os._exit(code)
            pids.append(pid)
        codes = []
        for _ in pids:
            pid, status = os.wait()
            codes.append(status)
            if status:
                for other in pids:
                    with suppress(ProcessLookupError):  # it has ended
                        os.kill(other, signal.SIGKILL)
    return None if any(codes) else found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="*", type=int, default=[64, 256, 1000])
    parser.add_argument("--backends", nargs="*", default=["unisono", "gloo"])
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load_all()
    gc.disable()  # a collection in a rank copies every page
    gc.freeze()
    for size in arguments.ranks:
        print(f"{size} ranks, a plan of {len(pickle.dumps(plan_of(1, size, arguments.tensors))):,} bytes")
        for backend in arguments.backends:
            found = job(size, backend, arguments)
            if found is None:
                print(f"  {backend}: failed")
                continue
            for place, name in enumerate(WORK):
                rounds = found[:, :1] if name == "start" else found
                seconds = statistics.median(rounds[:, :, place, 0].max(0))
                cpu = statistics.median(rounds[:, :, place, 1].sum(0))
                peak = rounds[0, :, place, 2].max()
                print(f"  {backend:8} {name:8} {seconds:9.3f} s {cpu:9.2f} CPU s {peak:8.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
