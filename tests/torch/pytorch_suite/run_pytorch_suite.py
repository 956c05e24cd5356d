"""PyTorch's own distributed test suite, over Unisono: `run_pytorch_suite.py gloo --out FILE [NAME ...]`.

The suite is the one in the torch wheel, unchanged: torch.testing._internal.distributed.distributed_test. Many
of its tests are reserved for a backend by name, so there are several ways to run it:

    unisono     under its own name
    gloo        with Unisono in the place of Gloo (UNISONO_REPLACE=gloo)
    mpi         the groups are Unisono's, the tests believe in MPI: all-to-all on the CPU
    real-gloo   PyTorch's Gloo, to compare with
    nccl        on virtual GPUs, one for each rank

PyTorch spawns the ranks of every test. Here they are forked from this process, which has imported PyTorch
once: a test takes half a second instead of ten. `--spawn` is PyTorch's way.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

WAYS = ("unisono", "gloo", "mpi", "real-gloo", "nccl")
LIMIT_S = 120  # for one test


def main() -> int:
    arguments = parse()
    screen = os.fdopen(os.dup(1), "w", buffering=1)
    with tempfile.TemporaryDirectory() as folder:
        prepare(arguments, folder)
        gc.disable()  # collections while modules are imported take half a second
        suite = import_suite(arguments.way)
        made = make_class(suite, f"suite {arguments.way} x{arguments.world_size}", spawn=arguments.spawn)
        chosen = arguments.names or [name for name in names(suite) if name not in arguments.without]
        tests = [made(name) for name in chosen]
        gc.freeze()  # a collection in a rank would copy every page of what was imported
        gc.enable()
        result = Recorded(screen, len(tests))
        unittest.TestSuite(tests).run(result)
    arguments.out.write_text(json.dumps(result.outcomes, indent=1) + "\n")
    return int(any(outcome["outcome"] == "failed" for outcome in result.outcomes.values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="the outcomes, as JSON")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what PyTorch and the ranks print")
    parser.add_argument("--spawn", action="store_true", help="start the ranks as PyTorch does")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="leave this test out")
    parser.add_argument("names", nargs="*", metavar="NAME", help="tests; without any, all")
    return parser.parse_intermixed_args()


def prepare(arguments: argparse.Namespace, folder: str) -> None:
    """Set what PyTorch's own runner sets, before PyTorch is imported; send all it prints to the log."""
    os.environ.update(
        BACKEND=arguments.way.removeprefix("real-"),
        WORLD_SIZE=str(arguments.world_size),
        INIT_METHOD=f"file://{folder}/init",
        MASTER_ADDR="127.0.0.1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(LIMIT_S),
        OMP_NUM_THREADS="1",
        UNISONO_REPLACE="gloo" if arguments.way == "gloo" else "",
    )
    if arguments.way == "nccl":
        from unisono import virtual
        from unisono.virtual.environment import set_for_children

        virtual.enable(arguments.world_size)
        set_for_children(os.environ, arguments.world_size, "0", poison=True, check_streams=False)
    log = os.open(arguments.log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)


def import_suite(way: str) -> ModuleType:
    """Import PyTorch's module. While it is imported it reads BACKEND, and what that backend can do."""
    import torch.utils._triton
    from torch.testing._internal.common_distributed import DistTestCases

    import unisono.torch.process_group  # noqa: F401  (registering alone would leave that to every rank)

    # PyTorch's harness asks this when it sets up a test. Where Triton is that starts CUDA: forks need it off.
    torch.utils._triton.has_triton = lambda **_: False
    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add(os.environ["BACKEND"])
    import torch.testing._internal.distributed.distributed_test as suite

    if way == "mpi":  # only the skips have had to believe it: PyTorch has no MPI to replace
        suite.BACKEND = "unisono"
    return suite


def names(suite: ModuleType) -> list[str]:
    """Return all of PyTorch's tests, in the order of its file."""
    return [name for name in vars(suite.DistributedTest._DistTestBase) if name.startswith("test_")]


def make_class(suite: ModuleType, title: str, *, spawn: bool) -> Any:
    """Make the test class as PyTorch's test_distributed_spawn.py does, with ranks started our way."""
    import torch.multiprocessing

    class TestDistributed(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            if "recorder" in sys.modules:
                sys.modules["recorder"].begin(f"{title} {self._testMethodName}")
            if spawn:
                self._spawn_processes()
            else:
                self._start_processes(torch.multiprocessing.get_context("fork").Process)

    TestDistributed.__qualname__ = TestDistributed.__name__
    globals()[TestDistributed.__name__] = TestDistributed  # where spawned ranks look for it
    return TestDistributed


class Recorded(unittest.TestResult):
    """Outcome, reason and seconds of each test; one line of progress each."""

    def __init__(self, screen: Any, total: int) -> None:
        super().__init__()
        self.outcomes: dict[str, dict[str, Any]] = {}
        self._screen = screen
        self._total = total
        self._started = 0.0

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self._started = time.monotonic()

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self._note(test, "passed", "")

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._note(test, "failed", str(err[1]))

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._note(test, "failed", str(err[1]))

    def _note(self, test: Any, outcome: str, reason: str) -> None:
        name = test._testMethodName
        seconds = round(time.monotonic() - self._started, 1)
        self.outcomes[name] = {"outcome": outcome, "reason": reason, "seconds": seconds}
        print(f"[{len(self.outcomes)}/{self._total}] {outcome} {name} ({seconds} s)", file=self._screen)


if __name__ == "__main__":
    sys.exit(main())
if __name__ == "__mp_main__":  # a rank that was spawned looks for the test's class here
    make_class(import_suite(parse().way), "a spawned rank", spawn=True)
