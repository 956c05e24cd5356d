"""`gpu_fork_server.py GPUS MEMORY`: runs programs as the ranks of jobs with virtual GPUs.

A job is a line of JSON on standard input, answered with the exit codes of its ranks. PyTorch is imported
once; every rank is a fork of this process, with the environment that a launcher gives it. What a rank prints
goes to FOLDER/out<rank>.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import threading
from pathlib import Path

from unisono import virtual

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

if __name__ == "__main__":
    virtual.enable(int(sys.argv[1]), sys.argv[2])

import torch._dynamo
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from torch.distributed.fsdp import fully_shard  # noqa: F401

import unisono.torch  # noqa: F401
from forks import wait


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a rank would copy every page of what was imported
    for line in sys.stdin:
        job = json.loads(line)
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **job["environ"]}
        pids = [fork(job, rank, environ) for rank in range(job["size"])]
        print(json.dumps(wait(pids, job["limit_s"])), flush=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def fork(job: dict, rank: int, environ: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    out = os.open(Path(job["folder"], f"out{rank}"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    size = str(job["size"])
    os.environ.update(environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os._exit(run(job["words"]))


def run(words: list[str]) -> int:
    """Run a program with its arguments as `python` would, to the functions at its exit."""
    code = 0
    sys.argv = words
    try:
        if "TORCH_CUDA_SANITIZER" in os.environ:  # PyTorch looks for it when it is imported
            importlib.import_module("torch.cuda._sanitizer").enable_cuda_sanitizer()
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
