"""The plans that `up.plan` compares, those one step away, and what the expert axis sends."""

from __future__ import annotations

import torch
from torch import nn

import unisono.parallel as up
from inside_parallel import changes, neighbours, plans
from planned_models import adamw, features

CROSS = nn.functional.cross_entropy


def test_candidates_are_plans_that_differ() -> None:
    found = list(plans(8, 16, {"zero": 1}, host=4))
    assert len(set(found)) == len(found) > 50
    assert all(each.ranks == 8 and each.zero == 1 and each.tensor <= 4 for each in found)
    assert all(16 % (each.data * each.micro_batches) == 0 for each in found)
    assert {each.shard for each in found if each.data == 8} == {None, 2, 4}
    around = neighbours(up.Plan(data=4, zero=2), 4, 16, host=4)
    assert all(changes(other, up.Plan(data=4, zero=2)) for other in around)
    assert up.Plan(data=4, zero=2, shard=2) in around
    assert up.Plan(data=4) in neighbours(up.Plan(data=4, zero=1, shard=2), 4, 16, host=4)


def test_what_is_asked_for_is_searched_too() -> None:
    found = set(plans(4, 16, {}, host=4, axes=("context", "expert", "disk")))
    for plan in (
        up.Plan(context=4, zero=3),
        up.Plan(context=2, data=2, expert=4),
        up.Plan(context=2, tensor=2, recompute=True),
        up.Plan(data=4, swap="disk"),
    ):
        assert plan in found
    assert all(each.ranks == 4 for each in found)
    around = neighbours(up.Plan(data=4), 4, 16, host=4, axes=("context", "expert", "disk"))
    assert {up.Plan(data=2, context=2), up.Plan(data=4, expert=2), up.Plan(data=4, swap="disk")} <= {*around}
    assert not any(each.context > 1 or each.expert > 1 or each.swap for each in plans(4, 16, {}, host=4))
    for given in ({"context": 2}, {"expert": 2}, {"swap": "memory"}):
        assert {str(getattr(each, *given)) for each in plans(4, 16, given, host=4)} == {str(*given.values())}


class Experts(nn.Module):
    """Eight experts that are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 8
        self.up, self.down = (nn.Parameter(torch.randn(8, *shape)) for shape in ((256, 512), (512, 256)))

    def forward(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        made = torch.einsum("rd,edh->erh", rows, self.up).relu()
        every = torch.einsum("erh,ehd->red", made, self.down)
        return (every.gather(1, index[..., None].expand(-1, -1, 256)) * weights[..., None]).sum(1)


class Mixture(nn.Module):
    """A router, experts and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.head = nn.Linear(256, 8), Experts(), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.head(x + self.experts(x, index, weights))


def test_experts_that_are_spread_send_rows_and_reduce_less() -> None:
    of = up.StepPredictor(Mixture(), features(16), loss=CROSS, optimizer=adamw)
    whole, spread = (of.forecast(up.Plan(data=2, expert=each)).seconds for each in (1, 2))
    assert spread["experts"] > 0 == whole.get("experts", 0)
    (sent,) = (each for each in of.collectives(up.Plan(data=2, expert=2)) if each.axis == "expert")
    assert sent[:3] == ("all_to_all", "expert", 2) and 0 < sent.seconds < spread["experts"]
    assert spread["data"] < 0.6 * whole["data"]
    assert spread["update"] < 0.6 * whole["update"]
    assert spread["forward"] > whole["forward"]  # rows are sorted
