"""Runs jobs one after the other, each as several processes: `fork_server.py PATH [GPUS MEMORY]`.

PyTorch is imported once, every rank is a fork. A job is a line of JSON on standard input, answered with its
number and the exit codes of its ranks, negative for a signal. What a rank prints goes to FOLDER/out<rank>. A
job names a module with `main(rank, size, folder, *args)`, or a program with its arguments (`words`), which
gets the environment of a launcher.

PATH: where modules are. With GPUS, ranks have that many virtual GPUs. See forks.py.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

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


def main(path: str, *gpus: str) -> None:
    sys.path.insert(0, path)
    gc.disable()  # collections while modules are imported take half a second
    if gpus:
        importlib.import_module("unisono.virtual").enable(int(gpus[0]), gpus[1])
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    gc.freeze()  # a collection in a rank would copy every page of what was imported
    gc.enable()
    gc.set_threshold(20_000)  # with the usual one, collections take a tenth of a rank's time
    for line in sys.stdin:
        job = json.loads(line)
        os.environ["PYTEST_CURRENT_TEST"] = job["test"]
        if "module" in job:
            importlib.import_module(job["module"])  # once, not in every rank
        pids = [fork(job, rank) for rank in range(job["size"])]
        print(json.dumps([job["number"], wait(pids, job["limit_s"], job["grace_s"])]), flush=True)
    gc.unfreeze()  # Python's end frees what was imported


def fork(job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(Path(job["folder"], f"out{rank}"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if "module" in job:
            sys.modules[job["module"]].main(rank, job["size"], Path(job["folder"]), *job["args"])
            code = 0
        else:
            size = str(job["size"])
            os.environ.update(
                job["environ"], RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size
            )
            code = run(job["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(words: list[str]) -> int:
    """Run a program with its arguments as `python` would, to the functions at its exit."""
    code = 0
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    try:
        if "TORCH_CUDA_SANITIZER" in os.environ:  # PyTorch looks for it when it is imported
            importlib.import_module("torch.cuda._sanitizer").enable_cuda_sanitizer()
        if "UNISONO_COMPARE" in os.environ:  # likewise Unisono's entry point
            importlib.import_module("unisono.compare.recorder").begin()
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # pools end their workers; the others are joined
    atexit._run_exitfuncs()
    return code


def wait(pids: list[int], limit_s: float, grace_s: float | None = None) -> list[int]:
    """Exit codes, negative for a signal.

    Remaining children are killed after `limit_s`, or `grace_s` after the first failure, if given.
    """
    deadline = time.monotonic() + limit_s
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] and grace_s is not None:
                    deadline = min(deadline, time.monotonic() + grace_s)
        if time.monotonic() > deadline:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    main(*sys.argv[1:])
