"""What plans promise, where sequences are cut. On two ranks."""

import math
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import unisono.parallel as up
from parallel import own_losses, plain_training
from parallel.contexts import Decoder, Encoder, OwnLoss, Recorded, batches, classes, mean, of_class
from parallel.plain_training import adamw, apart, same, seeded
from parallel.run_features import in_group
from unisono.parallel.context import attention
from unisono.parallel.context.exchange import ContextGroup
from unisono.parallel.context.layout import PositionSpan


def whole(run: up.Run) -> dict[str, Tensor]:
    found = {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in run.model.named_parameters()
    }
    return {name: value.detach().clone() for name, value in found.items()}


def check_every_gradient(folder: Path) -> None:
    """After one step of SGD each weight is that of one process: its gradient was."""
    cases = ((Decoder, batches(17), mean), (Encoder, classes(), of_class))
    for make, given, loss in cases:
        model = seeded(make)
        inputs, targets = given[0]
        loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets).backward()
        wanted = {name: p.detach() - p.grad for name, p in model.named_parameters()}
        for zero in (0, 3):
            run = up.parallelize(
                seeded(make), up.Plan(context=dist.get_world_size(), zero=zero), loss=loss,
                optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
            )  # fmt: skip
            run.step(given[0])
            for name, value in whole(run).items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def check_an_encoder(folder: Path) -> None:
    for zero in (0, 3):
        same(up.Plan(context=2, zero=zero, recompute=zero == 3), Encoder, classes(), of_class)


def check_a_mask(folder: Path) -> None:
    for heads, key_heads, time in ((3, 1, 16), (4, 4, 384)):
        kept = torch.arange(time) < torch.tensor([[time], [3], [time // 2], [time - 1]])
        given = [({"ids": x, "padding": kept}, y) for x, y in batches(time)]
        same(up.Plan(context=2), partial(Decoder, heads, key_heads), given, mean)


def check_the_gpt_of_the_benchmarks(folder: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    given = [(torch.randint(256, (2, 33), generator=generator), torch.zeros(2)) for _ in range(3)]
    same(up.Plan(context=2), Recorded, given, lambda output, _: output)


def check_the_models_own_loss(folder: Path) -> None:
    given = []
    for ids, _ in batches(16):
        labels = ids.masked_fill(torch.arange(16) >= torch.tensor([[3], [16], [9], [12]]), -100)
        given.append({"ids": ids, "labels": labels})
    wanted = own_losses.alone(OwnLoss, given)
    plans = {"micro_batches": 2, "zero": 2}, {"recompute": True, "zero": 3}, {"recompute": "selective"}
    for more in ({}, *plans):
        run = up.parallelize(
            seeded(OwnLoss), up.Plan(context=2, clip=0.5, **more), optimizer=adamw, loss=None,
            weigh=lambda labels: (labels[:, 1:] != -100).sum(),
        )  # fmt: skip
        own_losses.compare(wanted, run, given)


def check_a_sum_and_its_count(folder: Path) -> None:
    def counted(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        kept = targets % 3 > 0
        each = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return (each * kept).sum(), kept.sum()

    def alone(logits: Tensor, targets: Tensor) -> Tensor:
        value, count = counted(logits, targets)
        return value / count

    given = batches(16)
    wanted = plain_training.alone(Decoder, given, alone).losses
    run = up.parallelize(
        seeded(Decoder), up.Plan(context=2, micro_batches=2), optimizer=adamw, loss=counted, weigh="counted"
    )
    found = [run.step(batch) for batch in run.shard(given)]
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-5, (found, wanted)


def check_low_precision(folder: Path) -> None:
    def small(logits: Tensor, targets: Tensor) -> Tensor:  # without an overflow in fp16, which skips a step
        return mean(logits, targets) * 1e-3

    wanted = plain_training.alone(Decoder, batches(16), small).losses
    for precision in ("bf16", "fp16"):
        for zero in (0, 3):
            plan = up.Plan(context=2, precision=precision, zero=zero, recompute=zero == 3)
            _, (found, _) = plain_training.under(plan, Decoder, batches(16), small)
            assert max(abs(a - b) / a for a, b in zip(wanted, found, strict=True)) < 1e-2, (
                plan,
                found,
                wanted,
            )


def check_evaluate_and_predict(folder: Path) -> None:
    (x, y), *_ = batches(16)
    model = seeded(Decoder)
    run = up.parallelize(seeded(Decoder), up.Plan(context=2, micro_batches=2), optimizer=adamw, loss=mean)
    run.model.eval()
    with torch.no_grad():
        assert abs(run.evaluate((x, y)) - mean(model(x), y).item()) < 1e-6
        torch.testing.assert_close(run.predict(x), model(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(run.model(x), model(x), rtol=1e-5, atol=1e-6)  # whole, as before


def check_explain_names_the_traffic(folder: Path) -> None:
    for heads, time, operations in ((3, 16, {"send", "recv"}), (4, 384, {"all_to_all"})):
        run = up.parallelize(
            seeded(partial(Decoder, heads, heads)), up.Plan(context=2), optimizer=adamw, loss=mean
        )
        run.step(batches(time)[0], watch=True)
        seen = {(call.operation, call.where) for call in run.explain() if call.axis == "context"}
        assert operations <= {operation for operation, where in seen if where == "blocks.0.attention"}, seen
        assert "takes the other parts of the sequence" in str(run.explain()), str(run.explain())


def check_a_checkpoint_resumes_under_another_plan(folder: Path) -> None:
    given = batches(16, count=4)
    wanted = plain_training.alone(Decoder, given, mean).losses
    plans = (up.Plan(context=2, zero=3), up.Plan(data=2, zero=1), up.Plan(context=2))
    found, before = [], None
    for plan, part in zip(plans, (given[:2], given[2:3], given[3:]), strict=True):
        run = up.parallelize(seeded(Decoder), plan, optimizer=adamw, loss=mean)
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
            run = up.parallelize(
                seeded(partial(Decoder, heads, heads, 0.5)), up.Plan(context=2, recompute=recompute),
                optimizer=adamw, loss=mean,
            )  # fmt: skip
            losses.append([run.step(batch) for batch in batches(16)])
            assert apart(run) == 0
        assert losses[0] == losses[1]
    run = up.parallelize(
        seeded(lambda: Encoder(0.5)), up.Plan(context=2, zero=3), optimizer=adamw, loss=of_class
    )
    assert all(math.isfinite(run.step(batch)) for batch in classes())  # its head draws alike on both ranks


def check_dropout_is_that_of_the_mask_it_draws(folder: Path) -> None:
    """With the same draws again, the gradient is the slope of the loss."""
    ranks = ContextGroup(dist.new_group(), dist.get_rank(), dist.get_world_size())
    span = PositionSpan(8, 0, 8, ranks.ranks)
    how = attention.Attention(span, span, True, 0.5, 0.5, False, "up::attention")
    generator = torch.Generator().manual_seed(1)
    q, k, v, step = (torch.randn(1, 1, 8, 4, dtype=torch.float64, generator=generator) for _ in range(4))
    mine = span.positions(ranks.rank)

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


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
