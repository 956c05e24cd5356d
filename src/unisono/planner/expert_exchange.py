"""What ranks that spread experts send: the rows of tokens to their experts, and what comes back.

Two ways. "experts": a row for each expert of a token, as `unisono.parallel` sends them. "hosts": a row goes
once to each host that has some of a token's experts, and there once to each rank that has some; a router may
keep a token's experts on few hosts. Source: DeepSeek-V3, 2024 (arXiv:2412.19437), sections 2.1.2 and 3.2.2;
DeepEP, DeepSeek (2025).
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, comb
from typing import NamedTuple

from unisono.planner.collectives import GroupPrices
from unisono.planner.context_exchange import sequence_part
from unisono.planner.operators import expert_rows
from unisono.planner.training_plan import TrainingJob, TrainingPlan

__all__ = ["ExpertExchange", "expert_exchange", "places_hit"]


class ExpertExchange(NamedTuple):
    """One all-to-all of a layer and a micro-batch: bytes that a rank sends, and its seconds."""

    nbytes: float
    seconds: float


def expert_exchange(plan: TrainingPlan, job: TrainingJob, prices: GroupPrices) -> ExpertExchange:
    """What one of the four all-to-alls of a layer takes: two forward, two backward."""
    size, stride = plan.expert, plan.tensor * plan.context
    if job.dispatch == "experts":
        nbytes = job.width * expert_rows(plan, job) * job.shape.hidden / plan.tensor
        return ExpertExchange(nbytes, prices.collective_s("all_to_all", size, stride, nbytes))
    mixed, each = job.shape.mixed, prices.ranks_of_host(size, stride)
    hosts = ceil(size / each)
    # A token's experts have to have room on the hosts that the router allows.
    allowed = min(hosts, max(job.routed_hosts or hosts, ceil(mixed.top_k * hosts / mixed.count)))
    on_hosts = places_hit(allowed, mixed.count // hosts, mixed.top_k)
    on_ranks = places_hit(allowed * each, mixed.count // size, mixed.top_k)
    row = job.width * sequence_part(plan, job) * job.shape.hidden / plan.tensor
    row *= job.imbalance
    outside, inside = on_hosts * (hosts - 1) / hosts * row, on_ranks * (each - 1) / each * row
    return ExpertExchange(outside + inside, prices.two_level_s(inside, outside))


@lru_cache(maxsize=4096)
def places_hit(places: int, each: int, count: int) -> float:
    """Of so many places with `each` experts, how many have one of `count` different experts, on average.

    Example: places_hit(8, 32, 8) is about 5.3; places_hit(4, 1, 4) == 4.
    """
    total = places * max(1, each)
    count = min(count, total)
    return places * (1 - comb(total - max(1, each), count) / comb(total, count))
