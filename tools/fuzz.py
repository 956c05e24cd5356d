"""Fuzz the parsers of untrusted bytes: frames in C++ with libFuzzer, ASan and UBSan; decoders in Python.

fuzz.py [-max_total_time=SECONDS] [other options of libFuzzer]     `make fuzz ARGS=...` calls it

Both run in parallel for the same time, 60 s by default, from tests/fuzz/corpus. New inputs for frames stay
in a temporary folder; `-merge=1` adds inputs with more coverage to the corpus. Needs clang with its fuzzer's
runtime (Debian: clang-14 libclang-rt-14-dev). CLANGXX names the compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "fuzz" / "corpus" / "frames"
SOURCES = ("tests/fuzz/frames_fuzz.cpp", "csrc/protocol/frames.cpp")
FLAGS = (
    "-std=c++20", "-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=fuzzer,address,undefined",
    "-fno-sanitize-recover=all", "-Icsrc",
)  # fmt: skip
COMPILERS = ("clang++", *(f"clang++-{version}" for version in range(20, 13, -1)))
LONGEST_NBYTES = 2 + 1000  # kind, group, the longest frame
DEFAULT_S = 60


class NoFuzzer(Exception):
    """No compiler on this machine builds the target."""


def built(folder: Path) -> Path:
    """Build the target in `folder`.

    Raises:
        NoFuzzer: there is no clang, or it lacks libFuzzer; the text says what to install.
    """
    asked = os.environ.get("CLANGXX")
    found = [path for name in ([asked] if asked else COMPILERS) if (path := shutil.which(name))]
    if not found:
        where = f"CLANGXX={asked} is no program" if asked else "no clang++ in PATH"
        raise NoFuzzer(f"{where}. Install clang with its runtime (Debian: clang-14 libclang-rt-14-dev)")
    target = folder / "frames_fuzz"
    for compiler in found:
        done = subprocess.run(
            [compiler, *FLAGS, *SOURCES, "-o", str(target)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return target
        if "libclang_rt" not in done.stderr:
            break
    if "libclang_rt" in done.stderr:
        remedy = "Install it (Debian: libclang-rt-14-dev)"
        raise NoFuzzer(f"{compiler} has no libFuzzer runtime: {done.stderr.strip()[:300]}\n{remedy}")
    raise NoFuzzer(f"{compiler} cannot build the target:\n{done.stderr}")


def main(arguments: list[str]) -> int:
    """Build, fuzz, and report. Exit code: 0: no fault was found."""
    times = [one.partition("=")[2] for one in arguments if one.startswith("-max_total_time=")]
    seconds = times[-1] if times else str(DEFAULT_S)
    options = [*arguments] if times else [*arguments, f"-max_total_time={seconds}"]
    with tempfile.TemporaryDirectory(prefix="unisono-fuzz-") as name:
        folder = Path(name)
        try:
            target = built(folder)
        except NoFuzzer as error:
            print(f"make fuzz: {error}", file=sys.stderr)
            return 2
        new = folder / "new"
        new.mkdir()
        kept = [str(CORPUS), str(new)] if "-merge=1" in arguments else [str(new), str(CORPUS)]
        command = [str(target), f"-max_len={LONGEST_NBYTES}", "-use_value_profile=1", "-print_final_stats=1"]
        decoders = [sys.executable, str(ROOT / "tests/fuzz/decoders.py"), "--seconds", seconds]
        with subprocess.Popen(decoders) as python:
            frames = subprocess.run([*command, *options, *kept], check=False)
            decoded = python.wait()
    print(f"make fuzz: frames {'passed' if frames.returncode == 0 else 'FAILED'}", end=", ")
    print(f"decoders {'passed' if decoded == 0 else 'FAILED'}")
    return 1 if frames.returncode or decoded else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
