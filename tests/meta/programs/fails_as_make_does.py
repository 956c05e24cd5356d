"""Is silent for a while, leaves a child behind, and ends as a `make` that failed. Run by test_setup.py."""

import subprocess
import sys
import time

print("first", flush=True)
time.sleep(1.5)
print("last", flush=True)
subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL).returncode = 0
print("make: *** [Makefile:1: test] Error 3", flush=True)
sys.exit(3)
