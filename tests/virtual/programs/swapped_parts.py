"""Swapping of each rank's own parts of a model on virtual GPUs; see test_virtual.py.

`swapped_parts.py [many]`: prints the peaks of `zero=3` without swap, with "memory", with "disk".
"""

import gc
import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import unisono.parallel as up

MIB = 1 << 20
PARTS = (
    {"data": 2, "zero": 3}, {"data": 2}, {"data": 2, "zero": 1}, {"data": 2, "zero": 2, "precision": "bf16"},
    {"tensor": 2}, {"pipeline": 2, "micro_batches": 2},
)  # fmt: skip


def main(many: str = "") -> None:
    """On GPUs a rank's own parts are swapped, to the host and to a file; with another optimizer, saved and
    loaded. Prints the peaks of the first plan.
    """
    torch.cuda.set_device(rank := int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:unisono,cuda:nccl")
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    batch = torch.ones(8, 512).cuda().div_(8), torch.ones(8, 512).cuda()

    def begun(plan: dict, swap: str | None, adam: bool) -> up.Run:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8))).cuda()
        ways = (torch.optim.AdamW, {"lr": 1e-2}) if adam else (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
        torch.cuda.reset_peak_memory_stats()
        return up.parallelize(
            model,
            up.Plan(**plan, swap=swap),
            loss=nn.functional.mse_loss,
            optimizer=lambda p: ways[0](p, **ways[1]),
        )

    for plan in PARTS if many else PARTS[:1]:
        for adam in (True, False) if many and plan is PARTS[0] else (True,):
            losses, peaks, weights = [], [], []
            for swap in (None, "memory", "disk"):
                run = begun(plan, swap, adam)
                run.step(batch)
                torch.cuda.reset_peak_memory_stats()
                losses.append([run.step(batch) for _ in range(2)])
                peaks.append(torch.cuda.max_memory_allocated() / MIB)
                weights.append({name: value for name, value in run.weights() if value is not None})
                run.save(f"{folder[0]}/{swap}")
                run.close()
                del run
                gc.collect()
                again = begun(plan, {None: "disk", "memory": None, "disk": "memory"}[swap], adam)
                again.load(f"{folder[0]}/{swap}")
                losses[-1].append(again.step(batch))
                again.close()
                del again
                gc.collect()
            if plan is PARTS[0] and rank == 0:
                print(
                    f"{plan} {'Adam' if adam else 'SGD'}: peaks of a step",
                    *(f"{peak:.1f}" for peak in peaks),
                    "MiB",
                )
            gap = 1e-5 if plan.get("tensor", 1) * plan.get("pipeline", 1) > 1 else 0.0
            for others, values in zip(losses[1:], weights[1:], strict=True):
                assert max(map(abs, map(float.__sub__, losses[0], others))) <= gap, (plan, losses)
                assert all(torch.allclose(values[k], v, 0, gap) for k, v in weights[0].items()), plan
            assert max(peaks[1:]) < peaks[0] * (0.5 if "zero" in plan else 1.0), (plan, peaks)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
