"""Serves a TCP store and prints its port. `store_server.py fork`: then forks and prints the child's pid.

Run by test_store_client.py.
"""

import os
import sys
import time

from unisono.engine.store import StoreServer

server = StoreServer()
print(server.port, flush=True)
if sys.argv[1:] == ["fork"]:
    pid = os.fork()
    if pid:
        print(pid, flush=True)
time.sleep(3600)
