"""The planner: from a transformer's numbers, hardware and a network to the best plan, with its reasons.

shape.py          TransformerShape: parameters and FLOPs;  model_config.py: from a Hugging Face config file
hardware.py       accelerators from TOML files;  interconnect.py: links in two levels, prices of collectives
training_plan.py  TrainingJob, TrainingPlan;  stages.py: what the ranks of a pipeline have
memory.py         bytes of the fullest rank, by cause
operators.py      seconds of a layer;  step_time.py: of a step, by cause
search.py         the fastest plans that fit;  neighbours.py: what refuses the others
planner.py        plan;  choice.py: its answer

It is data and arithmetic: no PyTorch, no process, and no model is needed.
"""

from __future__ import annotations

from unisono.planner.choice import PlanChoice
from unisono.planner.hardware import Efficiency, Hardware, find_hardware
from unisono.planner.planner import NoPlanFitsError, plan
from unisono.planner.shape import TransformerShape, shape_of
from unisono.planner.training_plan import TrainingPlan

__all__ = [
    "Efficiency",
    "Hardware",
    "NoPlanFitsError",
    "PlanChoice",
    "TrainingPlan",
    "TransformerShape",
    "find_hardware",
    "plan",
    "shape_of",
]
