"""Runs modules of this folder as several ranks: one Python for many jobs, each rank a fork of it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Jobs = dict[str, tuple[str, int, list[str]]]


class Forks:
    """A Python that has imported PyTorch, for all jobs of a test run. See the fixture `forks`."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in close)
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py")],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )

    def run(self, folder: Path, jobs: Jobs, limit_s: float = 60, grace_s: float = 60) -> dict[str, list[str]]:
        """Run jobs (name -> module, size, arguments), each in folder/name; per job, what its ranks printed.

        A rank that did not end by itself says so at the end of what it printed. Once one rank has failed, the
        others have `grace_s` to end.
        """
        limits = {"limit_s": limit_s, "grace_s": grace_s}
        return {name: self._run(folder / name, job, limits) for name, job in jobs.items()}

    def close(self) -> None:
        """End it."""
        with self._server:
            assert self._server.stdin is not None
            self._server.stdin.close()
        self._errors.close()

    def _run(self, folder: Path, job: tuple[str, int, list[str]], limits: dict[str, float]) -> list[str]:
        module, size, arguments = job
        folder.mkdir()
        order: dict[str, Any] = {"module": module, "size": size, "folder": str(folder), "args": arguments}
        order |= {**limits, "test": os.environ.get("PYTEST_CURRENT_TEST", "")}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        if self._server.stdout.readline() != "done\n":
            self._errors.seek(0)
            return [self._errors.read()]
        return [_printed(folder, rank) for rank in range(size)]


def _printed(folder: Path, rank: int) -> str:
    out, end = (folder / f"out{rank}").read_text(errors="replace"), (folder / f"end{rank}").read_text()
    return f"rank {rank}:\n{out}" + ("" if end == "0" else f"(ended with {end})")


def checks(package: str) -> list[str]:
    """List every function check_* of a package as module.function, without importing PyTorch."""
    return [
        f"{path.stem}.{node.name}"
        for path in sorted((HERE / package).glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]
