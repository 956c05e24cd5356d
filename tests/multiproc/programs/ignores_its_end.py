"""`ignores_its_end.py FOLDER`: both ranks ignore SIGTERM; rank 1 ends with exit code 5."""

import os
import signal
import sys
import time

from launched import rank, until

folder = sys.argv[1]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.open(f"{folder}/{rank}", os.O_CREAT)
until(lambda: len(os.listdir(folder)) == 2)
if rank == 1:
    sys.exit(5)
time.sleep(3600)
