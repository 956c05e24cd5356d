"""One rank of the checks, run by suite.py: `main(rank, size, folder, package, *names)`.

A check is a function `check_*(rank, size)`, named as module.function within the package. Every module gets a
process group of its own, and so do the checks after one that failed: a failed check fails alone. A line of
JSON per check says what went wrong, written at once: it outlives a rank that dies in the next check.
"""

import importlib
import json
import sys
import traceback
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401  (takes seconds: once here, before the ranks are forked)
import torch.distributed as dist

import unisono.torch  # noqa: F401

HERE = Path(__file__).resolve().parent
CALL_LIMIT = timedelta(seconds=120)
SKIPPED = "skipped: "
VERDICT_LIMIT = CALL_LIMIT + timedelta(seconds=10)  # another rank may still wait in a call

for _path in sorted((HERE / "checks").glob("*.py")):  # before the ranks are forked
    importlib.import_module(f"checks.{_path.stem}")


def main(rank: int, size: int, folder: Path, package: str, *names: str) -> None:
    verdicts = dist.FileStore(str(folder / "verdicts"), size)
    verdicts.set_timeout(VERDICT_LIMIT)
    with (folder / f"result{rank}").open("w", buffering=1) as results:
        for module, members in groupby(names, lambda name: name.partition(".")[0]):
            checks = importlib.import_module(f"{package}.{module}")
            for name in members:
                if not dist.is_initialized():
                    make_group(rank, size, folder / f"before {name}")
                outcome = outcome_of(getattr(checks, name.partition(".")[2]), name, rank, size)
                print(json.dumps([name, outcome]), file=results)
                if failed_anywhere(verdicts, name, rank, size, failed=is_failure(outcome)):
                    end_group()
            end_group()


def make_group(rank: int, size: int, path: Path) -> None:
    store = dist.FileStore(str(path), size)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=size, timeout=CALL_LIMIT)


def end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def outcome_of(check, name: str, rank: int, size: int) -> str:
    """Empty when the check passed, "skipped: " and why, or its traceback.

    `pytest.fail` and the like are no `Exception`.
    """
    if "recorder" in sys.modules:  # see recording/recorder.py
        module, _, function = name.partition(".")
        sys.modules["recorder"].begin(f"tests/torch/test_checks.py::test_checks[{size}-{module}] {function}")
    try:
        check(rank, size)
        dist.barrier()
    except KeyboardInterrupt:
        raise
    except pytest.skip.Exception as skipped:  # on every rank: this PyTorch does not have what is checked
        return f"{SKIPPED}{skipped}"
    except BaseException:
        return traceback.format_exc()
    return ""


def is_failure(outcome: str) -> bool:
    return bool(outcome) and not outcome.startswith(SKIPPED)


def failed_anywhere(verdicts: dist.FileStore, name: str, rank: int, size: int, *, failed: bool) -> bool:
    """Tell the other ranks how the check ended here; whether it failed on any of them."""
    if failed:
        end_group()  # at once: the others may wait in it for this rank
    verdicts.set(f"{name} {rank}", "failed" if failed else "passed")
    return b"failed" in [verdicts.get(f"{name} {other}") for other in range(size)]
