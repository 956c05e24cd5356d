"""Run the engine's tests on 64-bit ARM, on a machine of another kind: `make test-arm`.

    make test-arm ARGS="--cpu max,sve-max-vq=2 tests/unit -k kernel"     what follows is for pytest

qemu-user translates each instruction. The wheel of `make wheel ARGS=--aarch64` runs in the Python of Debian's
arm64 packages, which lie in build/arm64 with its C library; nothing is installed on this machine. Needs
Debian, qemu-aarch64 (apt install qemu-user) and PyPI. qemu orders memory as this machine's processor does:
that the orders suffice on ARM is shown by `make model`, not here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from wheels import ROOT

HOME = ROOT / "build" / "arm64"
TESTS = (
    "tests/unit",
    "tests/plans",
    "tests/conformance",
    "tests/multiproc",
    "tests/property",
    "tests/schedules",
)
PACKAGES = ("python3", "libpython3-stdlib", "libstdc++6")  # of Debian
REQUIREMENTS = (
    "numpy", "msgspec", "pytest>=9", "pytest-timeout", "pytest-xdist", "hypothesis", "ml_dtypes",
    "expecttest", "cryptography", "pyyaml", "protobuf",
)  # fmt: skip
# A process that Unisono starts is started as `sys.executable`, so this is what Python takes itself for.
STARTER = """#!/bin/sh
exec qemu-aarch64 -L {root} -0 {starter} {python} "$@"
"""


def main() -> int:
    """Prepare build/arm64, then run pytest there. Returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cpu", default="max,sve-max-vq=4", help="of qemu; cortex-a57 has no SVE (%(default)s)"
    )
    arguments, rest = parser.parse_known_args()
    for tool, package in (("qemu-aarch64", "qemu-user"), ("apt-get", "apt"), ("dpkg-deb", "dpkg")):
        if shutil.which(tool) is None:
            sys.exit(f"make test-arm needs {tool}: apt install {package}")
    python = debian_python(HOME / "root")
    site = packages(python.name.removeprefix("python"))
    # Not by PYTHONPATH: some tests set it for the programs that they start.
    (HOME / "root/usr/lib/python3/dist-packages/unisono_tests.pth").write_text(f"{site}\n")
    folder = starters(python)
    chosen = rest if any((ROOT / word.split("::")[0]).exists() for word in rest) else [*TESTS, *rest]
    env = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "QEMU_CPU": arguments.cpu,
        "UNISONO_SANITIZED": "1",  # as slow as under a sanitizer: fewer rounds, longer limits
    }
    what = "from unisono import _native; print('instruction sets:', *_native.isas())"
    subprocess.run([folder / "python", "-c", what], env=env, check=True)
    pytest = [folder / "python", "-m", "pytest", "-p", "no:cacheprovider", *chosen]
    return subprocess.run(pytest, env=env, cwd=ROOT, check=False).returncode


def debian_python(root: Path) -> Path:
    """Unpack the arm64 packages of this machine's Debian, once; return their Python."""
    if not (root / "usr" / "bin" / "python3").exists():
        print(f"==> unpacking {', '.join(PACKAGES)} for arm64 into {root.relative_to(ROOT)}", flush=True)
        state = HOME / "apt"
        for name in ("lists/partial", "archives/partial"):
            (state / name).mkdir(parents=True, exist_ok=True)
        (state / "status").touch()
        settings = {
            "APT::Architecture": "arm64", "APT::Architectures::": "arm64", "APT::Install-Recommends": "0",
            "APT::Sandbox::User": "root", "Debug::NoLocking": "1", "Dir::State": state, "Dir::Cache": state,
            "Dir::State::status": state / "status",
        }  # fmt: skip
        apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
        subprocess.run([*apt, "update"], check=True)
        subprocess.run([*apt, "install", "--yes", "--download-only", *PACKAGES], check=True)
        for package in sorted((state / "archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    return (root / "usr" / "bin" / "python3").resolve()


def packages(version: str) -> Path:
    """Unpack the wheels of the tests, and Unisono's own; return the folder."""
    site = HOME / f"site-{version}"
    tag = f"cp{version.replace('.', '')}"
    own = sorted((ROOT / "dist").glob(f"unisono-*-{tag}-*aarch64.whl"))
    if not own:
        sys.exit(
            f"dist has no wheel of {tag} for aarch64: make wheel ARGS='--aarch64 --python python{version}'"
        )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", site]
    pip += ["--only-binary=:all:", "--python-version", version, "--upgrade"]
    pip += [word for age in ("2_28", "2_27", "2_17") for word in ("--platform", f"manylinux_{age}_aarch64")]
    if not site.exists():
        print(f"==> installing {', '.join(REQUIREMENTS)}", flush=True)
        subprocess.run([*pip, *REQUIREMENTS], check=True)
    shutil.rmtree(site / "unisono", ignore_errors=True)
    subprocess.run([*pip, "--no-deps", own[-1]], check=True)
    return site


def starters(python: Path) -> Path:
    """Write the programs `python` and `unisono`; return their folder."""
    folder = HOME / "bin"
    folder.mkdir(exist_ok=True)
    starter = folder / "python"
    starter.write_text(STARTER.format(root=HOME / "root", starter=starter, python=python))
    (folder / "unisono").write_text(f'#!/bin/sh\nexec {starter} -m unisono "$@"\n')
    for program in folder.iterdir():
        program.chmod(0o755)
    return folder


if __name__ == "__main__":
    sys.exit(main())
