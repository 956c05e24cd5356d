"""Install PyTorch: print its size first, then show the progress of the download.

install_torch.py torch==X [torch==Y ...] [--required] [--cpu] [argument of pip install ...]

It installs the first version that pip has for this Python; with --cpu, the first that has a CPU build.
Without --required a machine that cannot install it continues without: a note, and exit code 0.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from progress import INTERRUPTED, follow

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
PYTHON = "{}.{}".format(*sys.version_info)
LOG = Path(sys.prefix, "torch-install.log")
SHOWN_LINES = 20  # of the log, after a failure
WITHOUT = "without it: make test TORCH=0"


class Build(NamedTuple):
    """A build of PyTorch with its dependencies, measured with 2.13.0 (CPU) and 2.15.0 (CUDA) on x86-64."""

    name: str
    download_gb: float
    disk_gb: float
    instead: str  # an alternative for the user

    @property
    def announcement(self) -> str:
        """Its size, and the alternatives."""
        sizes = f"about {self.download_gb:g} GB to download, {self.disk_gb:g} GB on disk"
        return f"{self.name}: {sizes}; {self.instead}"


CPU = Build("CPU build", 0.2, 0.9, WITHOUT)
CUDA = Build("CUDA build", 3, 5, f"the CPU build, 0.2 GB: make test TORCH=cpu; {WITHOUT}")


def build_offered(requirement: str, options: list[str]) -> Build | str:
    """Return the build that pip would install, or the reason why there is none.

    On x86-64 Linux a build without `+cpu` in its version brings CUDA.
    """
    name, _, version = requirement.partition("==")
    command = [*PIP, "index", "versions", *options, name]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)
    versions = re.findall(r"[\w.+]+", listing.stdout)
    if f"{version}+cpu" in versions:
        return CPU
    if version in versions:
        return CUDA if (sys.platform, platform.machine()) == ("linux", "x86_64") else CPU
    reason = listing.stderr.strip().splitlines()[-1:] or ["other versions only"]
    return f"pip finds no {requirement} for Python {PYTHON} ({reason[0]})"


def choose(requirements: list[str], options: list[str], *, cpu: bool) -> tuple[str, Build | str]:
    """Return the first requirement that pip can install, with its build; if there is none, the first reason.

    cpu: the first that has a CPU build.
    """
    offers = ((each, build_offered(each, options)) for each in requirements)
    refused = []
    for requirement, build in offers:
        if isinstance(build, Build) and (build is CPU or not cpu):
            return requirement, build
        refused.append(build if isinstance(build, str) else f"pip finds no CPU build of {requirement}")
    return requirements[0], refused[0]


class Stages:
    """The stage of pip; during a download with its progress."""

    INSTALLING = re.compile(r"Installing collected packages: (.*)")
    DOWNLOADING = re.compile(r"(?:Downloading|Using cached) ([A-Za-z0-9_.]+)-\S+\.whl \(")

    def __init__(self, folder: Path, build: Build) -> None:
        self._folder = folder  # pip's temporary folder
        self._build = build
        self._package = ""

    def __call__(self, line: str) -> str | None:
        """Return the stage of pip after this line, or a second later."""
        if found := self.INSTALLING.match(line.strip()):
            self._package = ""
            return f"installing {found[1].count(',') + 1} packages"
        if found := self.DOWNLOADING.match(line.strip()):
            self._package = found[1]
        if not self._package:
            return None
        share = f"{size_gb(self._folder):.2f} of about {self._build.download_gb:g} GB"
        return f"downloading {self._package}: {share}"


def size_gb(folder: Path) -> float:
    """Return the size of the files below a folder. Some may disappear meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total / 1e9


def install(requirement: str, options: list[str], build: Build) -> str:
    """Run pip; return its error, "" if there is none.

    The temporary folder is on the disk of the environment: /tmp may be small.
    """
    free_gb = shutil.disk_usage(sys.prefix).free / 1e9
    if free_gb < build.download_gb + build.disk_gb:
        return f"{free_gb:.1f} GB are free for {sys.prefix}, and {build.download_gb + build.disk_gb:g} needed"
    with tempfile.TemporaryDirectory(dir=sys.prefix, prefix="torch-download-") as folder:
        command = [*PIP, "install", "--progress-bar", "off", *options, requirement]
        stages = Stages(Path(folder), build)
        code = follow(command, LOG, stages, {**os.environ, "TMPDIR": folder})
    if code == INTERRUPTED:
        sys.exit(INTERRUPTED)
    if code:
        print(*LOG.read_text(encoding="utf-8").splitlines()[-SHOWN_LINES:], sep="\n")
    return f"pip failed with {code}; all it said: {LOG}" if code else ""


def main(arguments: list[str]) -> str | None:
    """Return the error, if there is one."""
    required = "--required" in arguments
    requirements = [each for each in arguments if each.startswith("torch==")]
    options = [each for each in arguments if each not in {*requirements, "--required", "--cpu"}]
    if importlib.util.find_spec("torch") is not None:
        return None
    print(f"==> installing PyTorch\n    asking pip which build it has for Python {PYTHON}", flush=True)
    requirement, build = choose(requirements, options, cpu="--cpu" in arguments)
    if isinstance(build, Build):
        print(f"    {requirement}, {build.announcement}", flush=True)
        failure = install(requirement, options, build)
    else:
        failure = build
    if failure and required:
        return f"error: PyTorch was not installed: {failure}"
    if failure:
        print(f"note: PyTorch was not installed: {failure}. The tests that need it are left out.", flush=True)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
