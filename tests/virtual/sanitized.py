"""`sanitized.py PROGRAM ARGUMENTS`: a program, with the library of virtual GPUs under the address sanitizer.

Our library alone is instrumented; the sanitizer's allocator serves all of the process, so memory of PyTorch
that our code uses after its end is seen, too.
"""

from __future__ import annotations

import functools
import os
import runpy
import subprocess
import sys

from unisono.virtual import build, startup

FLAGS = ("-fsanitize=address", "-fno-omit-frame-pointer", "-g1")
OPTIONS = "detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=1"  # Python never frees everything


def library(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return os.path.realpath(found.stdout.strip())


def main() -> None:
    startup.build.build = functools.partial(build.build, extra=FLAGS)
    if "ASAN_OPTIONS" in os.environ:
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    startup.prepare()  # before the sanitizer, which would look at the compiler, too
    # libstdc++ beside it: Python is no C++ program, and the sanitizer looks for __cxa_throw when it starts.
    before = f"{library('libasan.so')} {library('libstdc++.so.6')}"
    environ = {**os.environ, "LD_PRELOAD": before, "ASAN_OPTIONS": OPTIONS, "PYTHONMALLOC": "malloc"}
    os.execve(sys.executable, [sys.executable, *sys.argv], environ)


if __name__ == "__main__":
    main()
