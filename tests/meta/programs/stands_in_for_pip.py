"""Prints what pip does while it builds or downloads. Run by test_tools.py.

`stands_in_for_pip.py CASE [CODE]`: a case is a function, CODE is how it ends. Further arguments are pip's.
"""

from __future__ import annotations

import subprocess
import sys
import time


def ends(code: str, *_: str) -> None:
    print("pip runs", flush=True)
    sys.exit(int(code))


def meets_compiler_errors(*_: str) -> None:
    print("  [3/40] Building CXX object é")
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
