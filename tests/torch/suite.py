"""Runs modules of this folder as several ranks: one Python for many jobs, each rank a fork of it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run(
    folder: Path, jobs: dict[str, tuple[str, int, list[str]]], limit_s: float = 60
) -> dict[str, list[str]]:
    """Run jobs (name -> module, size, arguments), each in folder/name; per job, what its ranks printed.

    A rank that did not end by itself says so at the end of what it printed.
    """
    for name in jobs:
        (folder / name).mkdir()
    todo = [
        {"module": module, "size": size, "folder": str(folder / name), "args": arguments, "limit_s": limit_s}
        for name, (module, size, arguments) in jobs.items()
    ]
    path = folder / "jobs.json"
    path.write_text(json.dumps(todo))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "ranks.py"), str(path)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {name: [done.stdout + done.stderr] for name in jobs}
    return {name: [_printed(folder / name, rank) for rank in range(jobs[name][1])] for name in jobs}


def _printed(folder: Path, rank: int) -> str:
    out, end = (folder / f"out{rank}").read_text(errors="replace"), (folder / f"end{rank}").read_text()
    return f"rank {rank}:\n{out}" + ("" if end == "0" else f"(ended with {end})")


def checks() -> list[str]:
    """List every function check_* in checks/ as module.function, without importing PyTorch."""
    return [
        f"{path.stem}.{node.name}"
        for path in sorted((HERE / "checks").glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]
