"""Notes which functions of `torch.distributed` a test runs. The table of what works is made from these notes.

With a folder in UNISONO_TESTS_RECORD and this folder in PYTHONPATH, every Python process of a test run notes each
function of PyTorch's distributed modules and of the adapter that it enters, once per test:

    tests/torch/test_checks.py::test_check[2-works.check_x]<TAB>torch/distributed/distributed_c10d.py:2954<TAB>op=SUM

A line is written when a function is first seen, so nothing is lost when a process is killed.
"""

from __future__ import annotations

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
)
API = "torch/distributed/distributed_c10d.py"  # here arguments matter as well


class Recorder:
    """What this process has noted; a fork begins anew."""

    def __init__(self) -> None:
        self._test = ""
        self._places: dict[Any, str] = {}  # code object -> "torch/distributed/x.py:12"; "": not interesting
        self._noted: set[tuple[str, str, str]] = set()
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
        if place:
            self._note(place, details(frame.f_locals) if place.startswith(API) else "")

    def _note(self, place: str, detail: str) -> None:
        key = (self._test or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0], place, detail)
        if key in self._noted:
            return
        self._noted.add(key)
        if self._file is None:
            self._file = Path(FOLDER, f"calls-{os.getpid()}.txt").open("a", buffering=1)
        self._file.write("\t".join(key) + "\n")


def place_of(code: Any) -> str:
    """Return the file, from its package on, and the line of a function; "" if it is none of ours."""
    name = code.co_filename
    for source in SOURCES:
        at = name.find("/" + source)
        if at >= 0:
            return f"{name[at + 1 :]}:{code.co_firstlineno}"
    return ""


def details(given: dict[str, Any]) -> str:
    """Return what is worth a line of its own among the arguments of a call."""
    noted = []
    if "op" in given and type(given["op"]).__name__ in ("RedOpType", "ReduceOp"):
        noted.append("op=" + str(given["op"]).removeprefix("RedOpType.").removeprefix("ReduceOp."))
    if given.get("async_op") is True:
        noted.append("async_op")
    if given.get("tag") not in (0, None):
        noted.append("tag")
    return " ".join(noted)


_RECORDER = Recorder()


def begin(test: str) -> None:
    """Say which test this process, and those it forks, run from now on. Does nothing unless asked to record."""
    if FOLDER:
        _RECORDER.begin(test)


def start() -> None:
    """Begin to note, if the environment asks for it."""
    if FOLDER:
        os.register_at_fork(after_in_child=_RECORDER.restart)
        threading.setprofile(_RECORDER.saw)
        sys.setprofile(_RECORDER.saw)
