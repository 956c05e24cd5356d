"""Rank 0 becomes a shell with the word "protected" in its command line; then rank 1 fails."""

import os
import sys
from pathlib import Path

from launched import board, rank, until

if rank == 0:
    os.execlp("sh", "sh", "-c", "sleep 300; true", "protected")
until(lambda: b"protected" in Path(f"/proc/{board()[0][0]}/cmdline").read_bytes())
sys.exit(3)
