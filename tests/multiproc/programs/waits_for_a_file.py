"""`waits_for_a_file.py FILE`: prints its process, and waits until FILE is there."""

import os
import sys
from pathlib import Path

from launched import until

print(os.getpid(), flush=True)
until(Path(sys.argv[1]).exists)
