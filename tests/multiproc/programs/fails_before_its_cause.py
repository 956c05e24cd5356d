"""Rank 0 fails by its connection and has ended when rank 1, the cause, does."""

import sys

import unisono
from launched import board, rank, until

group = unisono.init_process_group()
if rank == 0:
    raise ConnectionResetError("Connection reset by peer")
until(lambda: board()[0][1] == 2)
sys.exit("bad input")
