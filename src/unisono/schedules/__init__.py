"""Schedules from elsewhere: read as plans, so that they are proved, priced, drawn, simulated and run.

msccl.py        MSCCL's XML; execution.py runs it, translation.py makes a plan of it
msccl_writer.py writes it
goal.py, chakra.py   GOAL and Chakra, both by actions.py
teccl.py        what TE-CCL's solver writes
recipe.py       an algorithm of the catalogue with groups
files.py        all of them by the suffix of a file
"""

from __future__ import annotations

from unisono.schedules.files import is_file, load, read_actions, save, steps_in

__all__ = ["is_file", "load", "read_actions", "save", "steps_in"]
