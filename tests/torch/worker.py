"""One rank of the checks, run by suite.py: `main(rank, size, folder)`.

Every module in checks/ gets a process group of its own, so the group is also made and destroyed again and
again in one process. Each function `check_*(rank, size)` is one check; what went wrong is written as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch._dynamo  # noqa: F401  (takes seconds: once here, before the ranks are forked)
import torch.distributed as dist

import unisono.torch  # noqa: F401

HERE = Path(__file__).resolve().parent
MODULES = [importlib.import_module(f"checks.{path.stem}") for path in sorted((HERE / "checks").glob("*.py"))]


def main(rank: int, size: int, folder: Path) -> None:
    results: dict[str, str] = {}
    for module in MODULES:
        name = module.__name__.rpartition(".")[2]
        store = dist.FileStore(str(folder / name), size)
        dist.init_process_group(
            "unisono", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20)
        )
        for check in [check for check in vars(module) if check.startswith("check_")]:
            if "recorder" in sys.modules:  # see recording/recorder.py
                test = f"tests/torch/test_checks.py::test_check[{size}-{name}.{check}]"
                sys.modules["recorder"].begin(test)
            results[f"{name}.{check}"] = _outcome(getattr(module, check), rank, size)
        dist.destroy_process_group()
    (folder / f"result{rank}.json").write_text(json.dumps(results))


def _outcome(check, rank: int, size: int) -> str:
    """Empty when the check passed, else its traceback."""
    try:
        check(rank, size)
        dist.barrier()
    except Exception:
        return traceback.format_exc()
    return ""
