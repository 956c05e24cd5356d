"""Random numbers of a step: tensor ranks share masks of whole values; data ranks and cut regions do not."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import crossed, swept
from parallel import models, sweep
from parallel.plain_training import adamw, apart, begun, same, seeded


class Noted(nn.Module):
    """Dropout by masks, in front of, within and after a cut region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 4)
        self.before, self.within, self.after = nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = torch.tanh(self.fc1(x * self.before(torch.ones_like(x))))
        x = self.fc2(x * self.within(torch.ones_like(x)))
        return x * self.after(torch.ones_like(x))


def alike(value: Tensor) -> bool:
    told = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(told, value.contiguous())
    return torch.equal(*told)


def trained(plan: up.Plan, seed: int | None = None, steps: int = 20) -> tuple[up.Run, list[Tensor]]:
    """The run, and the masks of its last step."""
    model, masks = seeded(Noted), list[Tensor]()
    if seed is not None:
        torch.manual_seed(seed)
    cuts = {"fc1": "column", "fc2": "row"} if plan.tensor > 1 else None
    batches = models.vector_batches(steps, 8)
    run = up.parallelize(
        model, plan, optimizer=adamw, loss=functional.cross_entropy, cuts=cuts, sample=batches[0][0]
    )
    for module in (run.model.before, run.model.within, run.model.after):
        module.register_forward_hook(lambda _module, _args, output: masks.append(output.detach()))
    for batch in run.shard(batches):
        masks.clear()
        run.step(batch)
    return run, masks


def check_masks_under_every_axis(folder: Path) -> None:
    usual = (up.Plan(tensor=2, recompute=True), up.Plan(tensor=2, zero=2), up.Plan(data=2, zero=3))
    others = up.Plan(tensor=2), up.Plan(data=2), up.Plan(data=2, micro_batches=2)
    # ranks with one seed, and with seeds of their own
    for plan, seed in crossed(swept(usual, others), (None, dist.get_rank())):
        run, masks = trained(plan, seed)
        before, within, after = masks[:3]
        assert apart(run) == 0, plan
        if plan.tensor == 2:
            assert alike(before), plan
            assert alike(after), plan
            assert not alike(within), plan
        else:
            assert not any(alike(mask) for mask in (before, within, after)), plan
        if plan.micro_batches == 2:
            assert not torch.equal(before, masks[3])


def check_the_callers_generator_is_left_alone(folder: Path) -> None:
    for plan in (up.Plan(tensor=2), up.Plan(data=2)):
        torch.manual_seed(5)
        wanted = torch.rand(3)
        model = seeded(Noted)
        torch.manual_seed(5)
        run = up.parallelize(model, plan, optimizer=adamw, loss=functional.cross_entropy)
        for batch in run.shard(models.vector_batches(2, 8)):
            run.step(batch)
        assert torch.equal(torch.rand(3), wanted)


def check_a_step_draws_the_same_again(folder: Path) -> None:
    """Recomputed or not; the next step draws other numbers."""
    losses = []
    for recompute in (False, True):
        plan = dataclasses.replace(up.Plan(tensor=2, clip=1e9), recompute=recompute)
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16), nn.Dropout(0.3)),
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5)),
            nn.Linear(16, 4),
        )
        run = up.parallelize(model, plan, optimizer=adamw, loss=functional.cross_entropy)
        (batch,) = run.shard(models.vector_batches(1, 8))
        losses.append([(run.step(batch), run.grad_norm) for _ in range(4)])
    assert losses[0] == losses[1], losses
    first, second = losses[0][:2]
    assert first != second


class Parallel(nn.Module):
    """Draws for all of x while its first layer is cut already."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.side = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.fc1(x))
        aside = self.side(functional.dropout(x, 0.5, self.training))
        return self.fc2(inner) + aside


def check_masks_for_whole_values_in_a_cut_region_are_refused(folder: Path) -> None:
    loss = functional.cross_entropy
    pair = {"fc1": "column", "fc2": "row"}
    (batch,) = models.vector_batches(1, 8)
    with pytest.raises(ValueError, match=r'"fc1" .*cannot be cut by column: .*(random|draws)'):
        begun(up.Plan(tensor=2), Parallel, loss, cuts=pair)
    run = begun(up.Plan(tensor=2), Parallel, loss, sample=batch[0])
    assert run.cut.modules.get("fc2") != "row", str(run.cut)
    run.step(batch)
    assert apart(run) == 0
    same(up.Plan(tensor=2), lambda: Parallel().eval(), models.vector_batches(3, 8), functional.cross_entropy)


def check_a_hugging_face_model_with_dropout(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=models.VOCABULARY, n_positions=models.TIME, n_embd=models.WIDTH, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    batches = models.text_batches(20, 4)
    for plan in (up.Plan(tensor=2), up.Plan(tensor=2, zero=1, recompute=True)):
        torch.manual_seed(dist.get_rank())
        run = up.parallelize(GPT2LMHeadModel(config).train(), plan, optimizer=adamw, loss=models.token_loss)
        losses = [run.step(batch) for batch in run.shard(batches)]
        assert losses[-1] < losses[0]
        assert apart(run) == 0
