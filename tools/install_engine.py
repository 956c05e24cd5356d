"""Install Unisono with pip -v: the screen shows the steps, the log everything, a failure its first error.

install_engine.py -e '.[dev]'       the arguments are those of `pip install`
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-v"]
OPTIONS = ["--no-build-isolation", "--progress-bar", "off"]
LOG = Path(sys.prefix, "engine-install.log")
STEP = re.compile(r"\*\*\* |\[\d+/\d+\] |Collecting |Installing collected packages")
ERROR = re.compile(r":\d+(:\d+)?: (fatal )?error: ")  # g++ and clang: FILE:LINE:COLUMN: error: ...
SHOWN_LINES = 60  # of the log, after a failure


def main(arguments: list[str]) -> int:
    """Return pip's exit code."""
    lines: list[str] = []
    with (
        LOG.open("w", encoding="utf-8", buffering=1) as log,
        subprocess.Popen(
            [*PIP, *OPTIONS, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as pip,
    ):
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                log.write(line)
                lines.append(line.strip())
                if STEP.match(lines[-1]):
                    print(f"    {lines[-1][:100]}", flush=True)
        except KeyboardInterrupt:  # the terminal sends it to pip, too
            pip.kill()
            print(f"interrupted; all pip said: {LOG}")
            return 130
    if pip.returncode:
        errors = [line for line in lines if ERROR.search(line)]
        print(*errors[:1], *lines[-SHOWN_LINES:], sep="\n")
        print(f"error: pip failed with {pip.returncode}; all it said: {LOG}")
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
