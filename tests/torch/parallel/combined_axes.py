"""Axes of sequences and of experts with those of matrices and of layers: all of training against one process.

On four ranks: losses of eight steps, the norm of the first gradients, and every parameter afterwards.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import unisono.parallel as up
from parallel import contexts, expert_models, sweep
from parallel.context_axes import hugging_face
from parallel.contexts import Decoder, Encoder
from parallel.plain_training import Make, apart, seeded
from parallel.run_features import in_group

STEPS, TOLERANCE = 8, 1e-5


def sgd(parameters: Any, rate: float = 0.1) -> torch.optim.Optimizer:
    """Whose parameters depend on gradients, not on their signs."""
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def same(plan: up.Plan, make: Make, batches: Sequence[Any], loss: Any, **more: Any) -> up.Run:
    """Assert that a plan trains as one process does."""
    optimizes = partial(sgd, rate=more.pop("rate", 0.1))
    plan = dataclasses.replace(plan, clip=1e9)
    model, losses, norms = seeded(make), [], []
    optimizer = optimizes(model.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        value = loss(getattr(output, "logits", output), targets)
        value.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.step()
        losses.append(value.item())
    run = up.parallelize(seeded(make), plan, optimizer=optimizes, loss=loss, **more)
    found = [(run.step(batch), run.grad_norm or 0.0) for batch in run.shard(batches)]
    far = {
        "losses": max(abs(a - b) for (a, _), b in zip(found, losses, strict=True)),
        "norm": abs(found[0][1] - norms[0]) / max(norms[0], 1.0),
        "state": 0.0,
    }
    state, wanted = run.state_dict(), model.state_dict()
    if dist.get_rank() == 0:
        assert set(state) == set(wanted), set(state) ^ set(wanted)
        far["state"], worst = max(
            (((state[name] - value).abs().max() / value.abs().max().clamp(min=1.0)).item(), name)
            for name, value in wanted.items()
            if value.is_floating_point()
        )
    if dist.get_rank() == 0:
        print(plan, type(model).__name__, far, worst, flush=True)
    assert max(far.values()) < TOLERANCE, (plan, far, found, losses)
    return run


def check_short(folder: Path) -> None:
    """All four axes, in pairs and more, for few steps."""
    ids = contexts.batches(10, 2)
    same(up.Plan(context=2, tensor=2, expert=2), ExpertDecoder, ids, contexts.mean, rate=0.01)
    plan = up.Plan(context=2, pipeline=2, expert=2, micro_batches=2, schedule="zb-h1")
    same(plan, ListedDecoder, ids, contexts.mean, rate=0.01, sample=ids[0][0])
    plan = up.Plan(context=2, pipeline=2, micro_batches=2, zero=1)
    same(plan, partial(Decoder, 4, 2), ids, contexts.mean, sample=ids[0][0], check=True)


def refused(says: str, make: Make, plan: up.Plan, **more: Any) -> None:
    with pytest.raises(ValueError, match=says):
        up.parallelize(seeded(make), plan, optimizer=sgd, loss=contexts.mean, **more)


def check_what_is_refused(folder: Path) -> None:
    refused(
        r'Layer itself calls the experts of "experts".* Put the list, .* into a module of their own',
        partial(expert_models.Layer, expert_models.experts()), up.Plan(data=2, tensor=2, expert=2),
        sample=torch.zeros(2, expert_models.WIDTH),
    )  # fmt: skip

    def two() -> nn.Module:
        model: Any = ExpertDecoder()
        for layer in model.layers:
            for name, value in layer.experts.named_parameters():
                setattr(layer.experts, name, nn.Parameter(value[:2].detach()))
            layer.experts.num_experts = 2
        return model

    refused(
        r'"layers\.0\.experts" \(Stacked\) has 2 experts, which expert=2 x tensor=2 does not divide',
        two, up.Plan(data=2, tensor=2, expert=2),
    )  # fmt: skip

    def layers() -> nn.Module:
        return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))

    refused(
        "context=2 cuts the stages of a pipeline from the program of Sequential: leave out pieces=",
        layers, up.Plan(context=2, pipeline=2), pieces=[*layers()],
    )  # fmt: skip


def check_context_with_tensor(folder: Path) -> None:
    ids, classes = contexts.batches(18, STEPS), contexts.classes(STEPS)
    decoder = partial(Decoder, 4, 2)
    for more in ({}, {"zero": 3, "recompute": True, "micro_batches": 2}):
        run = same(up.Plan(context=2, tensor=2, **more), decoder, ids, contexts.mean)
        assert run.cut is not None
        assert run.cut.modules
    cuts = {"blocks.*.up": "column", "blocks.*.down": "row"}
    for axes in ({"context": 2}, {"pipeline": 2}):
        run = same(up.Plan(tensor=2, **axes), decoder, ids, contexts.mean, cuts=cuts, sample=ids[0][0])
        assert all(path.endswith((".up", ".down")) for path in run.cut.modules), str(run.cut)
    same(up.Plan(context=2, tensor=2), Encoder, classes, contexts.of_class, sample=classes[0][0])


def check_draws_of_context_with_tensor(folder: Path) -> None:
    """Dropout differs between tensor ranks in cut regions only: what is whole stays equal."""
    for make, given, loss in (
        (partial(Decoder, 4, 2, 0.2), contexts.batches(18), contexts.mean),
        (partial(Encoder, 0.2), contexts.classes(), contexts.of_class),
    ):
        run = up.parallelize(
            seeded(make), up.Plan(context=2, tensor=2), optimizer=sgd, loss=loss, sample=given[0][0]
        )
        losses = [run.step(batch) for batch in run.shard(given)]
        whole = [run.evaluate(batch) for batch in run.shard(given[:1])]
        assert all(torch.tensor([*losses, *whole]).isfinite())
        assert apart(run) < TOLERANCE, apart(run)


def check_hugging_faces_models_under_context_with_tensor(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    ids = torch.randint(64, (STEPS, 4, 25), generator=torch.Generator().manual_seed(5))
    logits = [(each[:, :-1], each[:, 1:]) for each in ids]
    for kind in ("Llama", "GPT2", "Qwen2"):
        for more in ({}, {"zero": 3, "micro_batches": 2}):
            same(up.Plan(context=2, tensor=2, **more), partial(hugging_face, kind), logits, contexts.mean)


def check_stages_are_compared(folder: Path) -> None:
    """check=True: what stages return is compared with a copy of the model, and what is wrong is an error."""
    ids = contexts.batches(18, STEPS)
    sample, decoder = ids[0][0], partial(Decoder, 4, 2, 0.1)
    for more in ({"context": 2, "pipeline": 2, "zero": 1}, {"context": 4}):
        run = up.parallelize(
            seeded(decoder), up.Plan(**more), optimizer=sgd, loss=contexts.mean, sample=sample, check=True
        )
        assert run.step(ids[0]) > 0
        assert all(module.training for module in run.model.modules())
    given = expert_models.batches(2)
    run = up.parallelize(
        seeded(expert_models.stacked), up.Plan(data=2, pipeline=2, expert=2), optimizer=sgd,
        loss=expert_models.loss, check=True,
    )  # fmt: skip
    assert [run.step(batch) for batch in run.shard(given)]
    run = up.parallelize(
        seeded(decoder), up.Plan(pipeline=4), optimizer=sgd, loss=contexts.mean, sample=sample, check=True
    )
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if name == "blocks.1.up.weight" and not parameter.is_meta:
                parameter.mul_(2)
    with pytest.raises(  # or, where a rank comes too late: the run ends, with this text
        (ValueError, RuntimeError),
        match=r"does not compute what Decoder does: tensor 0 of its output differs",
    ):
        run.step(ids[0])


def check_experts_with_tensor(folder: Path) -> None:
    """Experts on four ranks: a row goes from one rank of its tensor group."""
    given = expert_models.batches(STEPS, 7)  # ranks have uneven shares of rows
    for more in ({"zero": 0}, {"zero": 3, "recompute": True, "micro_batches": 2}):
        run = same(
            up.Plan(data=2, tensor=2, expert=2, **more), expert_models.stacked, given, expert_models.loss
        )
        assert run.cut is not None
        assert run.cut.modules
        mine = [p for name, p in run.model.named_parameters() if ".experts." in name]
        assert {p.device_mesh.shape[-1] for p in mine} == {4}


def check_experts_with_pipeline(folder: Path) -> None:
    given = expert_models.batches(STEPS)
    for make in (expert_models.stacked, expert_models.listed):
        for more in ({"zero": 0}, {"zero": 3, "recompute": True}):
            plan = up.Plan(data=2, pipeline=2, expert=2, micro_batches=2, **more)
            same(plan, make, given, expert_models.loss)


class ExpertDecoder(Decoder):
    """Attention, and a layer of experts after each block."""

    layer: Any = staticmethod(lambda: expert_models.Layer(expert_models.Stacked()))

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.layers = nn.ModuleList(self.layer() for _ in self.blocks)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block, layer in zip(self.blocks, self.layers, strict=True):
            x = layer(block(x, padding))
        return self.norm(x) @ self.words.weight.T


class ListedDecoder(ExpertDecoder):
    """Whose experts are lists."""

    layer = staticmethod(lambda: expert_models.Layer(expert_models.experts()))


def check_experts_with_context(folder: Path) -> None:
    ids = contexts.batches(18, STEPS)
    for more in (
        {"data": 2, "context": 2, "expert": 2},
        {"data": 2, "context": 2, "expert": 4, "zero": 3, "recompute": True},
        {"context": 2, "tensor": 2, "expert": 2, "micro_batches": 2},
    ):
        same(up.Plan(**more), ExpertDecoder, ids, contexts.mean, rate=0.01)  # a larger one amplifies rounding


def check_hugging_faces_experts(folder: Path) -> None:
    """Of each family the axes together that its attention allows."""
    if not sweep.HAVE_TRANSFORMERS:
        return
    given = expert_models.batches(STEPS // 2)
    for name, make in expert_models.HUGGING_FACE.items():
        for more in (
            {"data": 2, "tensor": 2},
            {"data": 2, "tensor": 2, "zero": 3, "recompute": True},
            {"data": 2, "pipeline": 2, "micro_batches": 2, "zero": 1},
            {"data": 2, "context": 2},
            {"data": 2, "tensor": 2, "sequence": True},
            {"context": 2, "pipeline": 2, "micro_batches": 2, "schedule": "zb-h1"},
        ):
            if dist.get_rank() == 0:
                print(name, flush=True)
            sample = {"input_ids": given[0][0]}
            same(up.Plan(expert=2, **more), sdpa(make), given, expert_models.loss, sample=sample, rate=0.02)


def check_hugging_faces_experts_without_an_axis_of_them(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    given = expert_models.batches(STEPS // 2)
    for name, make in expert_models.HUGGING_FACE.items():
        for more in (
            {"data": 2, "pipeline": 2, "micro_batches": 2, "zero": 3},
            {"data": 2, "context": 2, "zero": 1},
            {"tensor": 2, "context": 2},
            {"context": 2, "pipeline": 2, "micro_batches": 2, "schedule": "zbv"},
        ):
            if dist.get_rank() == 0:
                print(name, flush=True)
            sample = {"input_ids": given[0][0]}
            same(up.Plan(**more), sdpa(make), given, expert_models.loss, sample=sample, rate=0.02)


def check_balance_losses(folder: Path) -> None:
    """Of Hugging Face's Mixtral, whose loss has a product of means over the rows of a data rank."""
    if not sweep.HAVE_TRANSFORMERS:
        return

    def balanced() -> nn.Module:
        model: Any = sdpa(expert_models.HUGGING_FACE["mixtral"])()
        model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5
        model.router_aux_loss_coef = 0.5
        return model

    tokens = [inputs for inputs, _ in expert_models.batches(STEPS)]
    model, wanted = seeded(balanced), []
    optimizer = sgd(model.parameters())
    for inputs in tokens:
        optimizer.zero_grad()
        value = sum(model(input_ids=part, labels=part).loss for part in inputs.chunk(2)) / 2
        value.backward()
        wanted.append(value.item())
        optimizer.step()
    given = [{"input_ids": x, "labels": x} for x in tokens]
    for axis in ("tensor", "pipeline", "context"):
        plan = up.Plan(data=2, expert=2, **{axis: 2})
        run = up.parallelize(seeded(balanced), plan, optimizer=sgd, loss=None, sample=given[0], weigh="rows")
        losses = [run.step(batch) for batch in run.shard(given)]
        worst = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
        if dist.get_rank() == 0:
            print(plan, worst, flush=True)
        assert worst < TOLERANCE, (plan, losses, wanted)
        state, last = run.state_dict(), model.state_dict()
        if dist.get_rank() == 0:
            name = "model.layers.0.mlp.gate.weight"
            torch.testing.assert_close(state[name], last[name], rtol=1e-5, atol=1e-5)


def sdpa(make: Make) -> Make:
    def made() -> nn.Module:
        model: Any = make()
        if model._supports_sdpa:  # gpt-oss has sinks, and writes attention out
            model.set_attn_implementation("sdpa")
        return model

    return made


class TiedDecoder(Decoder):
    """The table of words is the weight of the last layer, which another stage calls."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.head = nn.Linear(*reversed(self.words.weight.shape), bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, padding)
        return self.head(self.norm(x))


def check_context_with_pipeline(folder: Path) -> None:
    ids, classes = contexts.batches(18, STEPS), contexts.classes(STEPS)
    decoder = partial(Decoder, 4, 2)
    for more in (
        {"micro_batches": 2},
        {"zero": 3, "recompute": True, "micro_batches": 4, "schedule": "interleaved"},
    ):
        run = same(up.Plan(context=2, pipeline=2, **more), decoder, ids, contexts.mean, sample=ids[0][0])
        run.model.eval()
        (x, y), *_ = run.shard(ids)
        whole = run.predict(x)
        assert abs(contexts.mean(whole, y).item() - run.evaluate((x, y))) < TOLERANCE
    same(up.Plan(context=2, pipeline=2), Encoder, classes, contexts.of_class, sample=classes[0][0])
    same(up.Plan(context=2, pipeline=2, zero=1), TiedDecoder, ids, contexts.mean, sample=ids[0][0])


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
