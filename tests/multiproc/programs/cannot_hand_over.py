"""`cannot_hand_over.py HOW`: raises when the descriptor for reports is "closed" or "replaced"."""

import os
import sys

import unisono as un

group = un.init_process_group()
fd = int(os.environ["UNISONO_REPORT_FD"].partition(":")[0])
if sys.argv[1] == "closed":
    os.close(fd)
else:
    os.dup2(os.open("/dev/null", os.O_RDWR), fd)
raise un.Mismatch("of my own")
