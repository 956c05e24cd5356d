"""Install PyTorch, and print its size first.

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

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
SIZES_GB = {"CPU": (0.2, 0.9), "CUDA": (3, 5)}
"""To download, and on the disk: measured with 2.13.0 (CPU) and 2.15.0 (CUDA) on x86-64."""
INSTEAD = {
    "CPU": "without it: make test TORCH=0",
    "CUDA": "smaller: make test TORCH=cpu; without it: TORCH=0",
}


def choose(requirements: list[str], options: list[str], *, cpu: bool) -> tuple[str, str]:
    """Return the first requirement that pip has, and its build; the build "" means that there is none.

    On x86-64 Linux a build without `+cpu` in its version brings CUDA.
    """
    command = [*PIP, "index", "versions", *options, "torch"]
    listing = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    versions = re.findall(r"[\w.+]+", listing)
    plain = "CUDA" if (sys.platform, platform.machine()) == ("linux", "x86_64") else "CPU"
    for requirement in requirements:
        version = requirement.removeprefix("torch==")
        build = "CPU" if f"{version}+cpu" in versions else plain if version in versions else ""
        if build and (build == "CPU" or not cpu):
            return requirement, build
    return requirements[0], ""


def install(requirements: list[str], options: list[str], *, cpu: bool) -> str:
    """Return what went wrong, "" if nothing did."""
    requirement, build = choose(requirements, options, cpu=cpu)
    if not build:
        python = "{}.{}".format(*sys.version_info)
        return f"pip finds no {'CPU build of ' * cpu}{' or '.join(requirements)} for Python {python}"
    download_gb, disk_gb = SIZES_GB[build]
    sizes = f"about {download_gb} GB to download, {disk_gb} GB on disk"
    print(f"    {requirement}, {build} build: {sizes}; {INSTEAD[build]}", flush=True)
    free_gb = shutil.disk_usage(sys.prefix).free / 1e9
    if free_gb < download_gb + disk_gb:
        return f"{free_gb:.1f} GB are free for {sys.prefix}, and {download_gb + disk_gb} needed"
    with tempfile.TemporaryDirectory(dir=sys.prefix, prefix="torch-download-") as folder:  # /tmp may be small
        command = [*PIP, "install", *options, requirement]
        code = subprocess.run(command, env={**os.environ, "TMPDIR": folder}, check=False).returncode
    return f"pip failed with {code}" if code else ""


def main(arguments: list[str]) -> str | None:
    """Return the error, if there is one."""
    requirements = [each for each in arguments if each.startswith("torch==")]
    options = [each for each in arguments if each not in {*requirements, "--required", "--cpu"}]
    if importlib.util.find_spec("torch") is not None:
        return None
    print("==> installing PyTorch", flush=True)
    failure = install(requirements, options, cpu="--cpu" in arguments)
    if failure and "--required" in arguments:
        return f"error: PyTorch was not installed: {failure}"
    if failure:
        print(f"note: PyTorch was not installed: {failure}. The tests that need it are left out.", flush=True)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
