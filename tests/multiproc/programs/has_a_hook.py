"""Raises with an excepthook of its own."""

import sys

import unisono as un

sys.excepthook = lambda kind, error, trace: print("my own hook:", error, file=sys.stderr)
group = un.init_process_group()
raise un.Mismatch("for it")
