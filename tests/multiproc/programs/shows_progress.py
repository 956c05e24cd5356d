"""Writes a part of a line to a terminal, and sleeps."""

import sys
import time

sys.stderr.write("\r 10%")
sys.stderr.flush()
time.sleep(3600)
