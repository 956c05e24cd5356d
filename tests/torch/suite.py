"""Runs modules of this folder as several ranks: one Python for many jobs, each rank a fork of it."""

import ast
from pathlib import Path

from effort import HANG_S
from forks import ForkServer

HERE = Path(__file__).resolve().parent
Jobs = dict[str, tuple[str, int, list[str]]]


class Forks:
    """A Python that has imported PyTorch, for all jobs of a test run. See the fixture `forks`."""

    def __init__(self) -> None:
        self._server = ForkServer(HERE)
        self.close = self._server.close

    def run(
        self, folder: Path, jobs: Jobs, limit_s: float = HANG_S, grace_s: float = 300
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


def checks(package: str) -> list[str]:
    """List every function check_* of a package as module.function, without importing PyTorch."""
    return [
        f"{path.stem}.{node.name}"
        for path in sorted((HERE / package).glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]
