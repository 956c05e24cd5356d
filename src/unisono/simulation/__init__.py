"""Plans and programs on networks that exist as data: how long they take, and what limits them.

simulate.py   one collective on a network
folding.py    which ranks do the same, so that one is simulated
codes.py      steps as numbers for the native simulator (csrc/simulator/)
program.py    programs of ranks: calls, compute and messages, with overlap
goal.py       GOAL programs, on LogGOPSim's network
segments.py   chunks and segments of a buffer
run.py        a run of the native simulator
result.py     what it has shown
"""

from __future__ import annotations

from unisono.simulation.goal import Operation, loggops
from unisono.simulation.program import (
    Call,
    Compute,
    Program,
    RecvFrom,
    SendTo,
    Wait,
    read_program,
    simulate_program,
    write_program,
)
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
    "read_program",
    "simulate",
    "simulate_program",
    "write_program",
]
