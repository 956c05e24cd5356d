"""Experts that are spread over ranks train as in one process, or are refused by name."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import unisono.parallel as up
from effort import crossed
from inside_parallel import spread
from parallel import plain_training, sweep
from parallel.expert_models import (
    EXPERTS,
    HUGGING_FACE,
    WIDTH,
    WORDS,
    Expert,
    Layer,
    Make,
    Stacked,
    batches,
    half_dropped,
    listed,
    loss,
    stacked,
    unnamed,
)
from parallel.plain_training import TOLERANCE, Trained, begun, distance, seeded, sgd


def same(plan: up.Plan, make: Make, given: Sequence[Any], **more: Any) -> up.Run:
    """In one process a missing gradient is zero."""
    return plain_training.same(plan, make, given, loss, optimizer=sgd, state=True, filled=True, **more)


def under(plan: up.Plan, make: Make, given: Sequence[Any], **more: Any) -> tuple[up.Run, Trained]:
    run, found = plain_training.under(plan, make, given, more.pop("loss", loss), optimizer=sgd, **more)
    return run, found._replace(state=run.state_dict())


def one_process(make: Make, given: Sequence[Any], **more: Any) -> Trained:
    return plain_training.alone(make, given, loss, optimizer=sgd, filled=True, **more)


def far(found: Trained, wanted: Trained) -> float:
    """How far two trainings are from each other."""
    losses = [abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    norm = abs(found.norms[0] - wanted.norms[0]) / max(wanted.norms[0], 1.0)
    return max(*losses, norm, *(distance(value, wanted.state[name]) for name, value in found.state.items()))


def plan(**more: Any) -> up.Plan:
    return up.Plan(data=dist.get_world_size(), **{"expert": 2} | more)


def check_experts_train_as_in_one_process(folder: Path) -> None:
    given = batches(3)
    for make, kind in ((stacked, "stacked"), (listed, "list")):
        run = same(plan(), make, given)
        assert [layer.kind for layer in run.experts.layers] == [kind] * 2, str(run.experts)
        mine = sum(p.numel() for name, p in run.model.named_parameters() if ".experts." in name)
        whole = sum(p.numel() for name, p in make().named_parameters() if ".experts." in name)
        assert mine in (whole, whole // 2)  # a DTensor has the size of all
        same(plan(zero=3, micro_batches=2, clip=0.5), make, given)
        same(plan(zero=1, recompute=True), make, given)


def check_experts_without_rows_and_ranks_without_rows(folder: Path) -> None:
    uneven, halves = batches(3, 7), batches(3, 7, halves=True)
    for make, zero in crossed((stacked, listed), (0, 3)):
        same(plan(zero=zero, recompute=zero == 3), lambda m=make: m(favourite=1), uneven)
        same(plan(zero=zero, recompute=zero == 3, uneven_use=True), half_dropped(make), halves)
        low = [(inputs % (WORDS // 2), targets) for inputs, targets in uneven]  # nobody has rows
        same(plan(zero=zero, uneven_use=True), half_dropped(make), low)


def check_capacity_counts_the_rows_of_a_rank(folder: Path) -> None:
    given, ranks = batches(3), dist.get_world_size()
    for make in (stacked, listed):
        few = lambda m=make: m(capacity=5)  # noqa: E731
        wanted = one_process(few, given, parts=ranks)  # rows are dropped within a part
        assert far(under(plan(), few, given)[1], wanted) < TOLERANCE
        assert abs(wanted.losses[-1] - one_process(make, given).losses[-1]) > 1e-4, "some rows are dropped"


def check_frozen_parameters(folder: Path) -> None:
    given = batches(3)

    def frozen(make: Make, *names: str) -> Make:
        def made() -> nn.Module:
            model = make()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not any(part in name for part in names))
            return model

        return made

    for make in (stacked, listed):
        for names in (("0.", "gate"), ("experts",), ("experts.0.", "experts.up")):
            same(plan(zero=2 if "gate" in names else 0), frozen(make, *names), given)


def check_a_checkpoint_goes_on_under_another_plan(folder: Path) -> None:
    given = batches(6)
    pairs = ((plan(zero=3), plan(expert=1)), (plan(expert=1, zero=1), plan()))
    for make, (first, second) in crossed((stacked, listed), pairs):
        wanted = one_process(make, given)
        place = folder / f"{make.__name__} {first}"
        run, before = under(first, make, given[:3])
        run.save(place)
        other = begun(second, make, loss, optimizer=sgd)
        other.load(place)
        after = [other.step(batch) for batch in other.shard(given[3:])]
        worst = max(abs(a - b) for a, b in zip(before.losses + after, wanted.losses, strict=True))
        assert worst < TOLERANCE, (first, second, worst)


def check_the_models_own_balance_loss_is_that_of_the_parts(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    ranks = dist.get_world_size()

    def balanced() -> nn.Module:
        model = HUGGING_FACE["mixtral"]()
        model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5
        model.router_aux_loss_coef = 0.5
        return model

    tokens = [{"input_ids": inputs, "labels": inputs} for inputs, _ in batches(3)]
    parts, whole = (
        plain_training.alone(balanced, tokens, None, optimizer=sgd, parts=parts) for parts in (ranks, 1)
    )
    assert abs(whole.losses[0] - parts.losses[0]) > 1e-3, "the loss of the whole batch is another one"
    for given in (plan(), plan(zero=3), plan(expert=1)):
        plain_training.same(given, balanced, tokens, None, optimizer=sgd, parts=ranks)


def check_low_precision_is_that_of_data_parallelism(folder: Path) -> None:
    given = batches(4)
    for make, zero in itertools.product((stacked, listed), (0, 1, 3)):
        wanted = under(plan(expert=1, zero=zero, precision="bf16"), make, given)[1]
        found = under(plan(zero=zero, precision="bf16"), make, given)[1]
        assert far(found, wanted) < 2e-2, (make, zero, far(found, wanted))


def check_evaluation_prediction_and_a_report(folder: Path) -> None:
    given = batches(2)
    for make in (stacked, listed):
        with torch.no_grad():
            wanted = seeded(make)(given[0][0])
        run = begun(plan(zero=1), make, loss, optimizer=sgd)
        (batch, other) = run.shard(given)
        run.model.eval()
        mine = run.predict(batch[0])
        rows = run.mesh.row * len(mine)
        torch.testing.assert_close(mine, wanted[rows : rows + len(mine)], rtol=1e-4, atol=1e-5)
        assert abs(run.evaluate(batch) - loss(wanted, given[0][1]).item()) < TOLERANCE
        run.model.train()
        run.step(other, watch=True)
        calls = [call for call in run.explain() if call.axis == "expert"]
        assert {call.operation for call in calls} == {"all_to_all"}, {call.operation for call in calls}
        assert {call.ranks for call in calls} == {2}
        assert {call.where for call in calls} == {layer.path for layer in run.experts.layers}


def check_a_model_on_the_meta_device(folder: Path) -> None:
    def fill(module: nn.Module) -> None:
        for value in module.parameters(recurse=False):
            nn.init.normal_(value, std=0.3)

    def shapes(make: Make) -> nn.Module:
        with torch.device("meta"):
            return make()

    given = batches(2)
    whole = up.materialize(shapes(stacked), seed=3, init=fill)
    wanted = loss(whole(given[0][0]), given[0][1]).item()
    for zero in (0, 3):
        run = up.parallelize(shapes(stacked), plan(zero=zero), optimizer=sgd, loss=loss, seed=3, init=fill)
        (batch, _) = run.shard(given)
        assert abs(run.step(batch) - wanted) < TOLERANCE
    with pytest.raises(ValueError, match=r'"1\.experts" .* list of experts on the meta device'):
        up.parallelize(shapes(listed), plan(), optimizer=sgd, loss=loss, seed=3, init=fill)


def check_what_the_user_names(folder: Path) -> None:
    given = batches(3)
    says = r'expert=2: no module of Sequential is known as a layer .*"path\.of\.\*\.list": "list"'
    refused(unnamed, says)
    run = same(plan(), unnamed, given, experts={"*.branches": "list"})
    assert [layer.path for layer in run.experts.layers] == ["1.branches"]
    run = same(plan(), stacked, given, experts={"1.experts": "whole"})
    assert [layer.path for layer in run.experts.layers] == ["3.experts"]
    same(plan(), listed, given, check=False)


def refused(make: Make, says: str, error: Any = ValueError, **more: Any) -> None:
    plain_training.refused(
        says, more.pop("plan", plan()), make, batches(1), loss, optimizer=sgd, error=error, **more
    )


class Crowd(Expert):
    """What a row gets depends on the others."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows - rows.mean() if len(rows) else rows)


class Chain(nn.Module):
    """Each one takes what the one before returned."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = x + expert(x)
        return x


class Counting(Layer):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(Expert() for _ in range(EXPERTS)))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Normed(Stacked):
    """Its output is no sum over experts."""

    def forward(self, rows: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.normalize(super().forward(rows, index, weight=weight), dim=-1)


class Open(Layer):
    """Takes the parameters of an expert without calling it."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(Expert() for _ in range(EXPERTS)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.experts[0].up.bias.sum()


def around(layer: Any) -> Make:
    return lambda: nn.Sequential(nn.Embedding(WORDS, WIDTH), layer(), nn.Linear(WIDTH, WORDS))


def check_what_is_no_layer_of_experts_is_refused_by_name(folder: Path) -> None:
    crowd = around(lambda: Layer(nn.ModuleList(Crowd() for _ in range(EXPERTS))))
    refused(crowd, r'expert=2 does not train Sequential as one process does.*"\*\.experts": "whole"')
    refused(around(Chain), r'"1\.experts": what expert 1 gets depends on the results of other experts')
    refused(around(Counting), r'"1\.experts": the module around the experts writes into .* its buffers')
    refused(around(lambda: Layer(Normed())), r"expert=2 does not train Sequential as one process does")
    refused(around(Open), r'"1\.experts": the program takes .up. of expert 0, so', AttributeError)


def check_wrong_arguments(folder: Path) -> None:
    refused(stacked, 'no module of Sequential is called "2.nothing"', experts={"2.nothing": "list"})
    refused(stacked, "experts: \"1.*\" is 'cut'; known are stacked, list, whole", experts={"1.*": "cut"})
    refused(stacked, "experts is .*, expected a dict", TypeError, experts=["1.experts"])
    refused(stacked, r'"1\.gate" \(Router\) is not stacked', experts={"1.gate": "stacked"})
    refused(stacked, r'"1\.shared" \(Expert\) is no nn.ModuleList', experts={"1.shared": "list"})
    refused(
        stacked, "experts= is for a plan that spreads them", plan=plan(expert=1), experts={"1.*": "whole"}
    )
    three = around(lambda: Layer(nn.ModuleList(Expert() for _ in range(3))))
    refused(three, r'"1\.experts" \(ModuleList\) has 3 experts, which expert=2 does not divide')

    def tied() -> nn.Module:
        model = listed()
        model[1].experts[0].up.weight = model[1].shared.up.weight
        return model

    refused(tied, r'"1\.experts\.0\.up\.weight" and "1\.shared\.up\.weight" are one parameter')


class Failing(Expert):
    """Raises on one rank, in the second step."""

    def forward(self, rows: Tensor) -> Tensor:
        if getattr(self, "fails", False) and dist.get_rank() == 1:
            raise ArithmeticError("one expert fails")
        return super().forward(rows)


def check_an_error_on_one_rank_ends_the_run_on_all(folder: Path) -> None:
    run, _ = under(
        plan(), around(lambda: Layer(nn.ModuleList(Failing() for _ in range(EXPERTS)))), batches(1)
    )
    for module in run.model.modules():
        module.fails = True
    error, says = (
        (ArithmeticError, "fails") if dist.get_rank() == 1 else (RuntimeError, "rank 1 raised Arith")
    )
    with pytest.raises(error, match=says):
        run.step(next(iter(run.shard(batches(1)))))
    with pytest.raises(RuntimeError, match="this run cannot be used any more: rank 1 raised ArithmeticError"):
        run.step(batches(1)[0])


def check_a_large_model_is_copied_only_where_it_is_asked_for(folder: Path) -> None:
    kept, spread.LIMIT_BYTES = spread.LIMIT_BYTES, 100
    try:
        refused(stacked, r'nothing proves that "1\.experts" \(Stacked\) .*check=True')
        same(plan(), stacked, batches(2), check=True)
        if sweep.HAVE_TRANSFORMERS:
            same(plan(), HUGGING_FACE["mixtral"], batches(2))
    finally:
        spread.LIMIT_BYTES = kept


def check_hugging_faces_models_train_as_in_one_process(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    given, ranks = batches(4), dist.get_world_size()
    plans = [plan(), plan(zero=1, micro_batches=2), plan(zero=2), plan(zero=3, recompute=True, clip=0.5)]
    plans += [plan(expert=ranks), plan(expert=ranks, zero=3)] if ranks > 2 else []
    plans += [plan(zero=3, shard=2), plan(zero=3, shard=2, expert=4)] if ranks > 2 else []
    for name, make in HUGGING_FACE.items():
        for one in plans:
            print(name, flush=True)
            same(one, make, given)


def check_own_models_train_as_in_one_process(folder: Path) -> None:
    given, ranks = batches(8), dist.get_world_size()
    for make, zero in itertools.product((stacked, listed), (0, 1, 2, 3)):
        for expert in {2, ranks}:
            same(plan(zero=zero, expert=expert), make, given)
            same(plan(zero=zero, expert=expert, micro_batches=2, recompute=True, clip=0.5), make, given)
        same(plan(zero=zero, uneven_use=True), make, given)
