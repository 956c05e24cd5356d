"""Install PyTorch where this machine can have it; otherwise say why in one line.

install_torch.py torch==X              the CPU build if there is one; never fails, tests go on without
install_torch.py torch==X --required   any build, also one of gigabytes with CUDA; fails if there is none
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
PYTHON = "{}.{}".format(*sys.version_info)
LOG = Path(sys.prefix, "torch-install.log")


def has_cpu_build(requirement: str) -> bool:
    """Whether pip would take a CPU build: on x86-64 Linux one without `+cpu` in its version brings CUDA."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return True
    name, _, version = requirement.partition("==")
    listing = subprocess.run([*PIP, "index", "versions", name], capture_output=True, text=True, check=False)
    return f"{version}+cpu" in listing.stdout


def install(requirement: str) -> bool:
    """Run `pip install requirement`: progress goes to the terminal, complaints to a log."""
    with LOG.open("w", encoding="utf-8") as log:
        return subprocess.run([*PIP, "install", requirement], stderr=log, check=False).returncode == 0


def main(requirement: str, required: bool) -> str | None:
    """Return what made it fail, if anything did."""
    if importlib.util.find_spec("torch") is not None:
        return None
    if not has_cpu_build(requirement):
        note = f"note: pip offers no CPU build of {requirement} for Python {PYTHON} here; "
        if not required:
            print(note + "going on without PyTorch, the tests that need it are left out.")
            return None
        print(note + "trying any build, which may be gigabytes.")
    if install(requirement):
        return None
    failure = f"{requirement} cannot be installed for Python {PYTHON} here (pip's words: {LOG})"
    if required:
        return f"error: {failure}. Try another Python: make clean && make demo PYTHON=python3.x"
    print(f"note: {failure}; going on without it, the tests that need it are left out.")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], required="--required" in sys.argv[2:]))
