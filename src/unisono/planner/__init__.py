"""The planner: from a transformer's numbers, hardware and a network to the best plan, with its reasons.

shape.py          TransformerShape: parameters and FLOPs;  model_config.py: that of a Hugging Face config file
hardware.py       accelerators and their links, from files; hosts that differ
training_plan.py  TrainingJob, TrainingPlan, and a plan as arguments of `unisono.parallel.Plan`
stages.py         what the ranks of a pipeline have: layers, micro-batches, tokens
collectives.py    links in two levels, prices of groups, what ranks that share sequences or experts send
memory.py         bytes of the fullest rank, by cause
layer_time.py     what a layer computes and sends, and its seconds;  step_time.py: of a step
plan_model.py     what prices plans, part by part: equal hosts and hosts that differ
search.py         all plans of a job, the fastest that fit, and what refuses those beside one
planner.py        plan, and its answer;  choice.py: what all answers have;  choice_page.py: their picture
operator_costs.py, compute_calibration.py: what operators take, for `unisono.parallel`

It is data and arithmetic: no PyTorch, no process, and no model is needed.
"""

from __future__ import annotations

from unisono.planner.hardware import Efficiency, Hardware, find_hardware
from unisono.planner.planner import NoPlanFitsError, PlanChoice, plan
from unisono.planner.shape import ExpertShape, LatentShape, TransformerShape, shape_of
from unisono.planner.training_plan import TrainingPlan

__all__ = [
    "Efficiency",
    "ExpertShape",
    "Hardware",
    "LatentShape",
    "NoPlanFitsError",
    "PlanChoice",
    "TrainingPlan",
    "TransformerShape",
    "find_hardware",
    "plan",
    "shape_of",
]
