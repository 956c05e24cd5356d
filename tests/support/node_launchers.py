"""`unisono run` on the hosts of a test, two ranks on each."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import hosts
from effort import HANG_S


class NodeLauncher:
    """A launcher on one host, and what it has printed."""

    def __init__(
        self, host: hosts.Node, token: Path, program: list[str], *flags: str, **environ: str
    ) -> None:
        settings = [f"{name}={value}" for name, value in environ.items()]
        launcher = ["env", "--default-signal=INT,TERM,HUP", *settings, sys.executable, "-m", "unisono", "run"]
        argv = [*launcher, "-n", "2", "--token-file", str(token), *flags, *program]
        self.process = host.start(argv, stderr=subprocess.STDOUT)
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def await_line(self, text: str) -> str:
        hosts.wait_until(lambda: re.search(text, self.output) or self.process.poll() is not None, 60)
        found = re.search(text, self.output)
        assert found, self.output
        return found[found.lastindex or 0]

    def end(self, timeout: float = 60) -> int:
        code = self.process.wait(timeout)
        self._reader.join(HANG_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def elastic_flags(net: hosts.Network, most: int) -> list[str]:
    """The flags of an elastic job that begins on two hosts."""
    return ["--nnodes", "2", "--master-addr", net[0].address, "--elastic", f"1:{most}"]
