"""Runs small programs as the ranks of a job with virtual GPUs; PyTorch is imported once for all of them.

Builds the library of virtual GPUs before the first test, whose time limit is not for that.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from effort import HANG_S
from forks import ForkServer
from ports import reserved
from unisono.virtual.startup import prepare

prepare()

MEMORY = "256M"  # of each GPU: filling it takes no time


class Ended(NamedTuple):
    """How a job ended. `codes`: of its ranks, negative for a signal; `printed`: by each."""

    codes: list[int]
    printed: list[str]

    @property
    def text(self) -> str:
        """All of it, for a test that fails."""
        pairs = zip(self.codes, self.printed, strict=True)
        return "\n".join(f"rank {i} ended with {code}:\n{text}" for i, (code, text) in enumerate(pairs))


class Machine:
    """A machine with virtual GPUs."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self._server = ForkServer(Path(__file__).resolve().parent, str(gpus), MEMORY)
        self.close = self._server.close

    def run(
        self,
        program: str | Path,
        size: int = 0,
        limit_s: float = HANG_S,
        arguments: Sequence[str] = (),
        **environ: str,
    ) -> Ended:
        """Run a program, a file or its text, as `size` ranks; 0: one for each GPU."""
        with tempfile.TemporaryDirectory() as folder, reserved() as port:
            if isinstance(program, str):
                script = Path(folder, "program.py")
                script.write_text(program)
            else:
                script = program
            words = [str(script), *arguments]
            environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environ}
            return Ended(
                *self._server.run(
                    Path(folder), size or self.gpus, limit_s=limit_s, words=words, environ=environ
                )
            )


@pytest.fixture(scope="session")
def machines() -> Iterator[dict[int, Machine]]:
    """The machines by their number of GPUs. They live as long as the session: a start takes seconds."""
    made: dict[int, Machine] = {}
    yield made
    for one in made.values():
        one.close()


@pytest.fixture(scope="session", params=[1, 2, 4])
def machine(request: pytest.FixtureRequest, machines: dict[int, Machine]) -> Machine:
    """A machine with 1, 2 or 4 GPUs."""
    if request.param not in machines:
        machines[request.param] = Machine(request.param)
    return machines[request.param]
