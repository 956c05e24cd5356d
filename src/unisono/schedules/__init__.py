"""Schedules from elsewhere: read as plans, so that they are proved, priced, drawn, simulated and run.

msccl.py        MSCCL's XML; execution.py runs it, translation.py makes a plan of it
xml_reader.py   XML with lines
"""

from __future__ import annotations

from unisono.schedules.files import is_file, load

__all__ = ["is_file", "load"]
