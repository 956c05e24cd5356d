"""Rank 0 listens on the master port; every rank connects to the launcher's store, which has another one."""

import os
import socket

from launched import rank

if rank == 0:
    socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
host, _, port = os.environ["UNISONO_STORE"].rpartition(":")
socket.create_connection((host, int(port)), timeout=5)
assert port != os.environ["MASTER_PORT"]
print("fine")
