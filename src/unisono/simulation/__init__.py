"""Plans and programs on networks that exist as data: how long they take, and what limits them.

simulate.py   one collective on a network
folding.py    which ranks do the same, so that one is simulated
codes.py      steps as numbers for the native simulator (csrc/simulator/)
run.py        a run of the native simulator
result.py     what it has shown
"""

from __future__ import annotations

from unisono.simulation.result import Breakdown, Limit, LinkUse, Result, Span
from unisono.simulation.simulate import simulate

__all__ = ["Breakdown", "Limit", "LinkUse", "Result", "Span", "simulate"]
