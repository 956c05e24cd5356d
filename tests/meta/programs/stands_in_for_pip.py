"""Prints what pip does while it builds or downloads. Run by test_tools.py.

`stands_in_for_pip.py CASE [CODE]`: a case is a function, CODE is how it ends. Further arguments are pip's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def compiles(code: str) -> None:
    print("  *** Configuring CMake...", flush=True)
    time.sleep(1.5)
    print("  [3/40] Building CXX object é", flush=True)
    sys.exit(int(code))


def downloads_pytorch(code: str, *_: str) -> None:
    print("Collecting torch==2.15.0", flush=True)
    print("  Downloading torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl (526.6 MB)", flush=True)
    Path(os.environ["TMPDIR"], "torch.whl").write_bytes(bytes(20_000_000))
    time.sleep(1.5)
    print("Installing collected packages: mpmath, torch", flush=True)
    time.sleep(1.5)
    sys.exit(int(code))


def meets_compiler_errors(*_: str) -> None:
    print("-- could not find error: this is not the compiler's")
    print("  /csrc/a.cpp:7:3: error: 'x' was not declared in this scope")
    print("  /csrc/b.cpp:1:10: fatal error: y.hpp: No such file or directory")
    print(*["ninja goes on"] * 100, sep="\n")
    sys.exit(1)


def is_cancelled(*_: str) -> None:
    """It ends when it is told, and leaves one behind that does not, with the pipe in its hands."""
    subprocess.Popen(["env", "--ignore-signal=INT", "sleep", "300"]).returncode = 0
    try:
        print("[3/40] Building CXX object", flush=True)
        time.sleep(300)
    except KeyboardInterrupt:
        print("cancelled", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
