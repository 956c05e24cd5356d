"""Rank 0 forks, starts processes and goes on; then it replaces its own program. Only that is a loss."""

import os
import subprocess
import sys
import time

import numpy as np

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"], timeout=30)
call = {
    "all_reduce": lambda: group.all_reduce(np.ones(3)),
    "recv": lambda: group.recv(np.ones(3), 0),
    "recv from any": lambda: group.recv(np.ones(3)),
}[sys.argv[1]]
if group.rank == 0:  # the others wait for it meanwhile
    child = os.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(0.2)"])
    subprocess.run([sys.executable, "-c", ""], check=True)
    os.waitpid(child, 0)
group.barrier()
if group.rank == 0:
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(2); print('fine')"])
began = time.monotonic()
try:
    call()
    print("returned", flush=True)
except un.PeerLost as error:
    soon = time.monotonic() - began < 2
    named = "runs another program" in str(error) or "UNISONO_RANKS_PER_HOST" in os.environ
    print("fine" if soon and error.rank == 0 and named else f"{soon} {error}", flush=True)
os._exit(0)
