"""One-sided communication: memory that a rank reads, writes and updates without its owner's help.

`opening.py` makes a `Window`, with the connections that it needs. `Group.window` is the way in. Nothing here
runs in a program without windows.
"""
