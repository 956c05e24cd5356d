"""`ranks.py JOBS.json`: runs jobs one after the other, each as several processes. Started by suite.py.

PyTorch is imported once; every rank is a fork. A job is a module with `main(rank, size, folder, *args)`.
What a rank prints goes to FOLDER/out<rank>, how it ended to FOLDER/end<rank>.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path


def main(path: str) -> None:
    jobs = json.loads(Path(path).read_text())
    modules = {job["module"]: importlib.import_module(job["module"]) for job in jobs}
    for job in jobs:
        folder = Path(job["folder"])
        pids = [
            fork(modules[job["module"]], rank, job["size"], folder, job["args"])
            for rank in range(job["size"])
        ]
        for rank, code in enumerate(wait(pids, job["limit_s"])):
            (folder / f"end{rank}").write_text(str(code))


def fork(module, rank: int, size: int, folder: Path, arguments: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(folder / f"out{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        module.main(rank, size, folder, *arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int], limit_s: float) -> list[int]:
    """Exit codes, negative for a signal. What is left after `limit_s` is killed."""
    deadline = time.monotonic() + limit_s
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    main(sys.argv[1])
