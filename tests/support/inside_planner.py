"""The inside of `unisono.planner` that tests use: after a change of its layout only this file changes.

A test uses a name of it for a part of the arithmetic that no plan shows by itself.
"""
# ruff: noqa: F401

from unisono.planner.choice_page import PricedCollective
from unisono.planner.collectives import RankLayout, collective_s, interconnect_of, places_hit
from unisono.planner.compute_calibration import (
    ComputeCalibration,
    Measurement,
    RuntimeCosts,
    SharedSteps,
    compute_file,
    keep_compute,
    middle,
    recall_compute,
)
from unisono.planner.hardware import HostMemory, LinkRate, find_cluster, shipped
from unisono.planner.memory import RankElements, layer_activations, model_states
from unisono.planner.model_config import MODEL_TYPES, named_models, read_shape
from unisono.planner.operator_costs import (
    POINTS,
    CostTable,
    OperatorCosts,
    operator_costs_of,
    roofline,
    roofline_of,
)
from unisono.planner.plan_model import PlanModel, with_layers
from unisono.planner.planner import PlanChoice
from unisono.planner.search import PlanTree, divisors, price, search, uneven_layers, uneven_rows
from unisono.planner.stages import in_flight, layers_of_rank, stage_layers
from unisono.planner.training_plan import MOST_TAIL, RECOMPUTE, SCHEDULES, SWAPS, TrainingJob
