"""What plans promise, where sequences are cut. On two ranks."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import unisono.parallel as up
from inside_parallel import PositionSpan, TensorAxis, attention
from parallel.contexts import Decoder, Encoder, OwnLoss, Recorded, batches, classes, mean, of_class
from parallel.plain_training import alone, apart, begun, seeded
from parallel.rows import Row
from parallel.run_features import whole


def check_every_gradient(folder: Path) -> None:
    """After one step of SGD each weight is that of one process: its gradient was."""
    cases = ((Decoder, batches(17), mean), (Encoder, classes(), of_class))
    for make, given, loss in cases:
        model = seeded(make)
        inputs, targets = given[0]
        loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets).backward()
        wanted = {name: p.detach() - p.grad for name, p in model.named_parameters()}
        for zero in (0, 3):
            plan = up.Plan(context=dist.get_world_size(), zero=zero)
            run = begun(plan, make, loss, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
            run.step(given[0])
            for name, value in whole(run).items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def padded(time: int) -> list[Any]:
    kept = torch.arange(time) < torch.tensor([[time], [3], [time // 2], [time - 1]])
    return [({"ids": x, "padding": kept}, y) for x, y in batches(time)]


def own(output: Any, _: Tensor) -> Tensor:
    return output


def labels() -> list[dict[str, Tensor]]:
    ends = torch.tensor([[3], [16], [9], [12]])
    return [{"ids": ids, "labels": ids.masked_fill(torch.arange(16) >= ends, -100)} for ids, _ in batches(16)]


def counted(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    kept = targets % 3 > 0
    each = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (each * kept).sum(), kept.sum()


def small(logits: Tensor, targets: Tensor) -> Tensor:
    """Without an overflow in fp16, which skips a step."""
    return mean(logits, targets) * 1e-3


def plans(*more: dict[str, Any]) -> list[up.Plan]:
    return [up.Plan(context=2, **one) for one in more]


RECORDED = [
    (ids, torch.zeros(2))
    for ids in torch.randint(256, (3, 2, 33), generator=torch.Generator().manual_seed(2))
]
TABLE = {
    "an encoder": Row(
        Encoder, plans({}, {"zero": 3, "recompute": True}), given=classes(), loss=of_class, sample=None
    ),
    "a mask, a ring": Row(partial(Decoder, 3, 1), plans({}), given=padded(16), loss=mean, sample=None),
    "a mask, heads": Row(partial(Decoder, 4, 4), plans({}), given=padded(384), loss=mean, sample=None),
    "the GPT of the benchmarks": Row(Recorded, plans({}), given=RECORDED, loss=own, sample=None),
    "the model's own loss": Row(
        OwnLoss,
        plans(
            {"clip": 0.5}, {"clip": 0.5, "micro_batches": 2, "zero": 2},
            {"clip": 0.5, "recompute": "selective"}, {"clip": 0.5, "recompute": True, "zero": 3},
        ),
        given=labels(), loss=None, sample=None,
        options={"weigh": lambda targets: (targets[:, 1:] != -100).sum()},
    ),
    "a sum and its count": Row(
        Decoder, plans({"micro_batches": 2}), given=batches(16), loss=counted, sample=None,
        options={"weigh": "counted"},
    ),
    "low precision": Row(
        Decoder,
        plans(*(
            {"precision": precision, **more}
            for precision in ("bf16", "fp16")
            for more in ({}, {"zero": 3, "recompute": True})
        )),
        given=batches(16), loss=small, sample=None, compare={"tolerance": 3e-5},
    ),
}  # fmt: skip


def check_evaluate_and_predict(folder: Path) -> None:
    (x, y), *_ = batches(16)
    model = seeded(Decoder)
    run = begun(up.Plan(context=2, micro_batches=2), Decoder, mean)
    run.model.eval()
    with torch.no_grad():
        assert abs(run.evaluate((x, y)) - mean(model(x), y).item()) < 1e-6
        torch.testing.assert_close(run.predict(x), model(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(run.model(x), model(x), rtol=1e-5, atol=1e-6)  # whole, as before


def check_explain_names_the_traffic(folder: Path) -> None:
    for heads, time, operations in ((3, 16, {"send", "recv"}), (4, 384, {"all_to_all"})):
        run = begun(up.Plan(context=2), partial(Decoder, heads, heads), mean)
        run.step(batches(time)[0], watch=True)
        seen = {(call.operation, call.where) for call in run.explain() if call.axis == "context"}
        assert operations <= {operation for operation, where in seen if where == "blocks.0.attention"}, seen
        assert "takes the other parts of the sequence" in str(run.explain()), str(run.explain())


def check_a_checkpoint_resumes_under_another_plan(folder: Path) -> None:
    given = batches(16, count=4)
    wanted = alone(Decoder, given, mean).losses
    plans = (up.Plan(context=2, zero=3), up.Plan(data=2, zero=1), up.Plan(context=2))
    found, before = [], None
    for plan, part in zip(plans, (given[:2], given[2:3], given[3:]), strict=True):
        run = begun(plan, Decoder, mean)
        if before is not None:
            run.load(before)
        found += [run.step(batch) for batch in run.shard(part)]
        before = folder / f"saved{run.steps}"
        run.save(before)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-5, (found, wanted)


def check_dropout(folder: Path) -> None:
    """Masks differ between ranks and steps, and are the same again where a unit is recomputed."""
    for heads in (3, 4):
        losses = []
        for recompute in (False, True):
            plan = up.Plan(context=2, recompute=recompute)
            run = begun(plan, partial(Decoder, heads, heads, 0.5), mean)
            losses.append([run.step(batch) for batch in batches(16)])
            assert apart(run) == 0
        assert losses[0] == losses[1]
    run = begun(up.Plan(context=2, zero=3), lambda: Encoder(0.5), of_class)
    assert all(math.isfinite(run.step(batch)) for batch in classes())  # its head draws alike on both ranks


def check_dropout_is_that_of_the_mask_it_draws(folder: Path) -> None:
    """With the same draws again, the gradient is the slope of the loss."""
    ranks = TensorAxis(dist.new_group(), dist.get_rank(), dist.get_world_size())
    span = PositionSpan(8, 0, 8, ranks.parts)
    how = attention.Attention(span, span, True, 0.5, 0.5, False, "up::attention")
    generator = torch.Generator().manual_seed(1)
    q, k, v, step = (torch.randn(1, 1, 8, 4, dtype=torch.float64, generator=generator) for _ in range(4))
    mine = span.positions(ranks.place)

    def value(scale: float, at: int) -> Tensor:
        torch.manual_seed(3)
        given = [t[:, :, mine] for t in (q, k, v)]
        given[at] = (given[at] + scale * step[:, :, mine]).requires_grad_()
        out = attention.attend(*given, None, how, ranks).pow(2).sum()
        total = out.detach().clone()
        out.backward()
        slope = (given[at].grad * step[:, :, mine]).sum()
        both = torch.stack([total, slope])
        dist.all_reduce(both, group=ranks.group)
        return both

    for at in range(3):
        ahead, behind, here = (value(scale, at) for scale in (1e-5, -1e-5, 0.0))
        assert abs((ahead[0] - behind[0]) / 2e-5 - here[1]) < 1e-6, at
