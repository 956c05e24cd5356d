"""Print in one line what this machine lacks to build Unisono. Runs on any Python of the system."""

import importlib.util
import os
import shutil
import sys
import sysconfig


def missing():
    """Return pairs of a missing part and its Debian package."""
    found = []
    headers = os.path.join(sysconfig.get_path("include") or "", "Python.h")
    if not os.path.exists(headers):
        found.append(("the headers of Python", "python3-dev"))
    if importlib.util.find_spec("ensurepip") is None:
        found.append(("venv", "python3-venv"))
    if shutil.which(os.environ.get("CXX", "").split(" ")[0] or "c++") is None:
        found.append(("a C++20 compiler", "g++"))
    return found


def main():
    """Exit with 1 and one line when something is missing."""
    if sys.version_info < (3, 10):
        sys.exit(
            "error: Unisono needs Python 3.10 or newer, %s is %d.%d. Try: make PYTHON=python3.11"
            % ((sys.executable,) + sys.version_info[:2])
        )
    found = missing()
    if found:
        names = " and ".join(what for what, _ in found)
        packages = " ".join(package for _, package in found)
        sys.exit("error: missing here: %s. On Debian: apt install %s" % (names, packages))


if __name__ == "__main__":
    main()
