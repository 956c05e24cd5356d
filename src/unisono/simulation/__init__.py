"""Plans and programs on networks that exist as data: how long they take, and what limits them.

simulate.py   one collective on a network
folding.py    which ranks do the same, so that one is simulated
items.py      what programs of ranks consist of: calls, compute and messages
recording.py  programs from what ranks of a real run have recorded, for more ranks
program.py    a program on a network; lowered.py makes codes of it
goal.py       GOAL programs, on LogGOPSim's network
segments.py   chunks and segments of a buffer
run.py        a run of the native simulator
result.py     what it has shown
"""

from __future__ import annotations

from unisono.simulation.goal import Operation, loggops
from unisono.simulation.items import (
    Call,
    Compute,
    Program,
    RecvFrom,
    SendTo,
    Wait,
    read_program,
    write_program,
)
from unisono.simulation.program import simulate_program
from unisono.simulation.recording import program_of, read_parts, scaled
from unisono.simulation.result import Breakdown, Limit, LinkUse, Result, Span
from unisono.simulation.simulate import simulate

__all__ = [
    "Breakdown",
    "Call",
    "Compute",
    "Limit",
    "LinkUse",
    "Operation",
    "Program",
    "RecvFrom",
    "Result",
    "SendTo",
    "Span",
    "Wait",
    "loggops",
    "program_of",
    "read_parts",
    "read_program",
    "scaled",
    "simulate",
    "simulate_program",
    "write_program",
]
