"""Prints how many SIGINT have come 0.2 s after the first."""

import signal
import time

from launched import until

seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(time.monotonic()))
print("ready", flush=True)
until(lambda: seen)
time.sleep(0.2)
print("interrupts", len(seen), flush=True)
