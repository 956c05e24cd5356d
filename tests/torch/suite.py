"""Runs modules of this folder as several ranks: one Python for many jobs, each rank a fork of it."""

import functools
import json
import re
from pathlib import Path
from typing import Any

from effort import HANG_S
from forks import ForkServer
from ports import reserved

HERE = Path(__file__).resolve().parent
Jobs = dict[str, tuple[str, int, list[str]]]


class Forks:
    """A Python that has imported PyTorch, for all jobs of a test run. See the fixture `forks`."""

    def __init__(self) -> None:
        self._server = ForkServer(HERE)
        self.close = self._server.close

    def run(
        self, folder: Path, jobs: Jobs, limit_s: float = HANG_S, grace_s: float = 100
    ) -> dict[str, list[str]]:
        """Run jobs (name -> module, size, arguments), each in folder/name; per job, what its ranks printed.

        A rank that did not end by itself says so at the end of what it printed. Once one rank has failed, the
        others have `grace_s` to end.
        """
        found = {}
        for name, (module, size, arguments) in jobs.items():
            (folder / name).mkdir()
            how = {"limit_s": limit_s, "grace_s": grace_s, "module": module, "args": arguments}
            codes, printed = self._server.run(folder / name, size, **how)
            found[name] = [
                f"rank {rank}:\n{text}" + (f"(ended with {code})" if code else "")
                for rank, (code, text) in enumerate(zip(codes, printed, strict=True))
            ]
        return found

    def run_program(
        self,
        folder: Path,
        size: int,
        program: Path,
        *arguments: str,
        ports: int = 1,
        dead: int = 0,
        **environ: Any,
    ) -> list[str]:
        """Run a program as a launcher runs its ranks; what each of them printed.

        Fails unless all of them end well but `dead` ones. ports: from MASTER_PORT on.
        """
        with reserved(ports) as port:
            environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environ}
            words = [str(program), *arguments]
            codes, printed = self._server.run(folder, size, words=words, environ=environ)
        assert sum(map(bool, codes)) == dead, f"ended with {codes}\n" + "\n".join(printed)
        return printed

    def losses(self, folder: Path, size: int, *jobs: dict[str, Any]) -> list[list[float]]:
        """The losses of each job of parallel/saves.py; their checkpoints are beside `folder`."""
        folder.mkdir(parents=True)
        arguments = [str(folder.parent / "shared"), *map(json.dumps, jobs)]
        printed = self.run(folder, {"saves": ("parallel.saves", size, arguments)})["saves"]
        written = folder / "saves" / "losses.json"
        assert written.exists(), "\n".join(printed)
        found: list[list[float]] = json.loads(written.read_text())
        return found


@functools.cache
def checks(package: str) -> list[str]:
    """List every function check_* of a package as module.function, without importing PyTorch."""
    return [
        f"{path.stem}.{name}"
        for path in sorted((HERE / package).glob("*.py"))
        for name in re.findall(r"^def (check_\w+)", path.read_text(), re.MULTILINE)
    ]
