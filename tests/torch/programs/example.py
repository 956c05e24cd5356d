"""One of the programs in examples/, run as its rank would be by a launcher. Run by suite.py.

What they import is imported here, once for all of them: each rank is a fork.
"""

import os
import runpy
import sys
from pathlib import Path

import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401

import unisono.torch  # noqa: F401

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def main(rank: int, size: int, folder: Path, name: str, port: str, *arguments: str) -> None:
    here = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in here.items()})
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *arguments]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
