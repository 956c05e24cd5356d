"""Records which functions of `torch.distributed` a test runs, for docs/reference/pytorch-table.md.

With a folder in UNISONO_TESTS_RECORD and this folder in PYTHONPATH, every Python process of a test run notes
each function of PyTorch's distributed modules and of the adapter that it enters, once per test:

    tests/torch/test_checks.py::test_checks[2-works] check_x<TAB>torch/distributed/fsdp.py:2954<TAB>op=SUM

A place of "type" is a class of `torch.distributed` that one of the arguments was an instance of. A line is
written when something is first seen, so nothing is lost when a process is killed.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("UNISONO_TESTS_RECORD", "")
SOURCES = (
    "torch/distributed/",
    "torch/nn/parallel/distributed.py",
    "torch/nn/modules/batchnorm.py",
    "unisono/torch/",
    "unisono/virtual/nccl.py",
)
TYPES = ("torch.distributed", "torch._C._distributed_c10d")
API = "torch/distributed/distributed_c10d.py"  # here arguments matter as well


class Recorder:
    """What this process has noted; a fork begins anew."""

    def __init__(self) -> None:
        self._test = ""
        self._places: dict[Any, str] = {}  # code object -> "torch/distributed/x.py:12"; "": not interesting
        self._noted: set[tuple[str, ...]] = set()
        self._file: Any = None

    def begin(self, test: str) -> None:
        """Say which test this process runs from now on. Otherwise it is the one that pytest names."""
        self._test = test
        self._noted.clear()

    def restart(self) -> None:
        """Forget what the parent process has noted."""
        self._noted.clear()
        self._file = None

    def saw(self, frame: Any, event: str, _argument: Any) -> None:
        """Be told of a call; this is what `sys.setprofile` takes."""
        if event != "call":
            return
        code = frame.f_code
        place = self._places.get(code)
        if place is None:
            place = self._places[code] = place_of(code)
        if not place:
            return
        test = self._test or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if self._note(test, place, ""):
            for value in frame.f_locals.values():
                for kind in type(value).__mro__:
                    if kind.__module__.startswith(TYPES):
                        self._note(test, "type", f"{kind.__module__}.{kind.__qualname__}")
        if place.startswith(API):
            for detail in details(frame.f_locals):
                self._note(test, place, detail)

    def _note(self, *line: str) -> bool:
        if line in self._noted:
            return False
        self._noted.add(line)
        if self._file is None:
            path = Path(FOLDER, f"calls-{os.getpid()}.txt")
            self._file = path.open("a", buffering=1)
        self._file.write("\t".join(line) + "\n")
        return True


def place_of(code: Any) -> str:
    """Return the file, from its package on, and the line of a function; "" if it is none of ours."""
    name = code.co_filename
    for source in SOURCES:
        at = name.find("/" + source)
        if at >= 0:
            return f"{name[at + 1 :]}:{code.co_firstlineno}"
    return ""


def details(given: dict[str, Any]) -> list[str]:
    """Return what is worth a line of its own among the arguments of a call."""
    noted = []
    op = given.get("op")
    if type(op).__name__ in ("RedOpType", "ReduceOp"):
        noted.append(f"op={str(getattr(op, 'op', op)).rpartition('.')[2]}")
    if given.get("async_op") is True:
        noted.append("async_op")
    if type(given.get("tensor")).__name__ in ("Tensor", "Parameter"):
        noted.append(f"dtype={given['tensor'].dtype}".replace("torch.", ""))
    store = given.get("store")
    while type(store).__name__ == "PrefixStore":
        store = store.underlying_store
    if type(store).__name__ in ("TCPStore", "FileStore", "HashStore"):
        noted.append(f"store={type(store).__name__}")
    return noted


_RECORDER = Recorder()


def begin(test: str) -> None:
    """Say which test this process, and those it forks, run from now on. Unless recording, do nothing."""
    if FOLDER:
        _RECORDER.begin(test)


def start() -> None:
    """Begin to note, if the environment asks for it."""
    if FOLDER:
        os.register_at_fork(after_in_child=_RECORDER.restart)
        threading.setprofile(_RECORDER.saw)
        sys.setprofile(_RECORDER.saw)
