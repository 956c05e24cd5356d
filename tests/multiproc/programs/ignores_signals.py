"""`ignores_signals.py NUMBER ...`: ignores them, prints the process of its supervisor, and sleeps."""

import os
import signal
import sys
import time

for number in sys.argv[1:]:
    signal.signal(int(number), signal.SIG_IGN)
print(os.getppid(), flush=True)
time.sleep(3600)
