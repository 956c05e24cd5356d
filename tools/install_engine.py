"""Install Unisono with pip, and show the compiler's progress: pip shows only "still running" for a minute.

install_engine.py -e '.[dev]'       the arguments are those of `pip install`

The output of pip and the compiler goes into a log. After a failure the program shows the compiler's first
error, then the end of the log.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from progress import INTERRUPTED, follow

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-v"]
OPTIONS = ["--no-build-isolation", "--progress-bar", "off"]
LOG = Path(sys.prefix, "engine-install.log")
ERROR = re.compile(r":\d+(:\d+)?: (fatal )?error: ")  # g++ and clang: FILE:LINE:COLUMN: error: ...
SHOWN_LINES = 60  # of the log, after a failure

STAGES = (
    (re.compile(r"\*\*\* Configuring CMake"), "configuring the engine's build"),
    (re.compile(r"\[([1-9]\d*)/(\d+)\] "), r"compiling the engine, step \1 of \2"),
    (re.compile(r"\*\*\* Installing project"), "installing the engine"),
    (re.compile(r"Collecting (\S+)"), r"fetching \1"),
    (re.compile(r"Installing collected packages"), "installing packages"),
)


def stage(line: str) -> str | None:
    """The stage that a line starts: "[3/40] Building ..." -> "compiling the engine, step 3 of 40"."""
    for pattern, text in STAGES:
        found = pattern.match(line.strip())
        if found:
            return found.expand(text)
    return None


def first_error(lines: list[str]) -> str:
    """The compiler's first error: "a.cpp:3:1: error: 'x' was not declared"; "": there is none."""
    return next((line.strip() for line in lines if ERROR.search(line)), "")


def main(arguments: list[str]) -> int:
    """Return pip's exit code."""
    code = follow([*PIP, *OPTIONS, *arguments], LOG, stage)
    if code == INTERRUPTED:
        print(f"interrupted; all pip said: {LOG}")
    elif code:
        lines = LOG.read_text(encoding="utf-8").splitlines()
        if error := first_error(lines):
            print(error)
        print(*lines[-SHOWN_LINES:], sep="\n")
        print(f"error: pip failed with {code}; all it said: {LOG}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
