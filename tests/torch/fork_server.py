"""Runs jobs one after the other, each as several processes. Started by suite.py.

A job is a line of JSON on standard input, answered with "done". It names a module with
`main(rank, size, folder, *args)`.
PyTorch is imported once; every rank is a fork. What a rank prints goes to FOLDER/out<rank>, how it ended to
FOLDER/end<rank>.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from forks import wait

# What every rank would otherwise import itself: DDP, FSDP2, meshes, checkpoints, Unisono's group and plans.
IMPORTED_ONCE = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "unisono.parallel",
    "unisono.torch.process_group",
)


def main() -> None:
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    gc.freeze()  # a collection in a rank would copy every page of what was imported
    for line in sys.stdin:
        job = json.loads(line)
        module, size, folder = importlib.import_module(job["module"]), job["size"], Path(job["folder"])
        os.environ["PYTEST_CURRENT_TEST"] = job["test"]
        pids = [fork(module, rank, size, folder, job["args"]) for rank in range(size)]
        for rank, code in enumerate(wait(pids, job["limit_s"], job["grace_s"])):
            (folder / f"end{rank}").write_text(str(code))
        print("done", flush=True)


def fork(module, rank: int, size: int, folder: Path, arguments: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(folder / f"out{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        module.main(rank, size, folder, *arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
