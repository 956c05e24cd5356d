"""Loads a library when it has run for a while, as an import in a function does: `loads_a_library.py FILE`."""

import ctypes
import sys
import time

time.sleep(0.2)
library = ctypes.CDLL(sys.argv[1])
time.sleep(0.5)
print("loaded")
