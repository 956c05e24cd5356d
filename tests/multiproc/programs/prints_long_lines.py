"""Each rank prints three lines of a megabyte, and one that does not end."""

import os
import sys

from launched import rank

letter = "abcd"[rank]
for _ in range(3):
    sys.stdout.write(letter * (1 << 20) + "\n")
sys.stdout.write("tail of " + letter)
sys.stdout.flush()
os._exit(0)
