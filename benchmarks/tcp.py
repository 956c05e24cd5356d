"""All-reduce between ranks that share no memory, over loopback, against Gloo in the same run.

    python benchmarks/tcp.py [RANKS] [more arguments of `unisono bench`]

`unisono bench` alternates the two and reports medians; here every rank is a host of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> int:
    """Run the benchmark; its exit code."""
    size, *more = sys.argv[1:] or ["2"]
    command = [sys.executable, "-m", "unisono", "bench", "all_reduce", "-n", size, "-f", "4"]
    environment = {**os.environ, "UNISONO_RANKS_PER_HOST": "1"}
    return subprocess.run([*command, "--against", "gloo", *more], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
