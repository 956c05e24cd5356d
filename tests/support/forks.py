"""One Python that has imported PyTorch, for many jobs: each rank is a fork of it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from effort import HANG_S

SERVER = Path(__file__).with_name("fork_server.py")


class ForkServer:
    """The process of fork_server.py, whose command line it takes."""

    def __init__(self, path: Path, *gpus: str) -> None:
        self._jobs = 0
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), str(path), *gpus],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )

    def run(
        self, folder: Path, size: int, *, limit_s: float = HANG_S, grace_s: float | None = None, **how: Any
    ) -> tuple[list[int], list[str]]:
        """Exit codes of the ranks, and what each printed.

        Args:
            how: `module` and `args`, or `words` and `environ`.
        """
        job = {"folder": str(folder), "size": size, "limit_s": limit_s, "grace_s": grace_s, **how}
        job["test"] = os.environ.get("PYTEST_CURRENT_TEST", "")
        self._jobs += 1
        job["number"] = self._jobs
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        number = 0
        while number != self._jobs:  # an earlier job, whose test had a timeout, may answer now
            answer = self._process.stdout.readline()
            if not answer:
                self._errors.seek(0)
                raise ChildProcessError(self._errors.read())
            number, codes = json.loads(answer)
        return codes, [(folder / f"out{rank}").read_text(errors="replace") for rank in range(size)]

    def close(self) -> None:
        """End it."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._errors.close()
