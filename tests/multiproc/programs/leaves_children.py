"""`leaves_children.py ENDING`: starts children, one in a session of its own and one that ignores SIGTERM.

It makes shared memory too, and prints the process of its supervisor. ENDING: "sleep", "exit" or "kill".
"""

import multiprocessing.shared_memory
import os
import signal
import subprocess
import sys
import time

from launched import rank

name = f"psm_{os.environ['LAUNCH_TEST_MARK']}_{rank}"
memory = multiprocessing.shared_memory.SharedMemory(name, create=True, size=4096)
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["sleep", "300"], start_new_session=True)
subprocess.Popen(["sh", "-c", "setsid sh -c 'trap \"\" TERM; sleep 300; sleep 300' &"]).wait()
print(os.getppid(), flush=True)
if sys.argv[1] == "sleep":
    time.sleep(300)
elif sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
