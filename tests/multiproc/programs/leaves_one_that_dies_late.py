"""`leaves_one_that_dies_late.py READY`: leaves a shell that ignores SIGTERM, with a child; it makes READY."""

import subprocess
import sys
from pathlib import Path

from launched import until

ready = Path(sys.argv[1])
subprocess.Popen(["sh", "-c", f"trap '' TERM; sleep 999 & touch {ready}; wait"])
until(ready.exists)
