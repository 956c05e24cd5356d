"""Axes of sequences and of experts with those of matrices and of layers: all of training against one process.

On four ranks: losses, the norm of the first gradients, and every parameter afterwards.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono.parallel as up
from parallel import contexts, expert_models, sweep
from parallel.context_axes import hugging_face
from parallel.contexts import Decoder, Encoder
from parallel.plain_training import Make, apart, begun, same, sgd
from parallel.rows import Row

STEPS = 8
OPTIMIZERS = {rate: partial(sgd, rate=rate) for rate in (0.1, 0.02, 0.01)}  # large ones amplify rounding
IDS, CLASSES = contexts.batches(18, STEPS), contexts.classes(STEPS)
TWO_IDS = contexts.batches(10, 2)
GIVEN, UNEVEN = expert_models.batches(STEPS), expert_models.batches(STEPS, 7)
DECODER = partial(Decoder, 4, 2)


def row(make: Make, plans: Iterable[Any], given: Any = IDS, loss: Any = contexts.mean, **more: Any) -> Row:
    """`rate`: of SGD, whose parameters depend on gradients, not on their signs."""
    options = {"optimizer": OPTIMIZERS[more.pop("rate", 0.1)], **more.pop("options", {})}
    plans = [plan if isinstance(plan, up.Plan) else up.Plan(**plan) for plan in plans]
    return Row(make, plans, given=given, loss=loss, options=options, compare={"state": True}, **more)


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


class NormedLayer(expert_models.Layer):
    """A list of experts behind a norm, which both runs of the layer take. The rows of experts are counted."""

    def __init__(self) -> None:
        super().__init__(expert_models.experts(), capacity=50)
        self.norm = nn.LayerNorm(expert_models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class CountedDecoder(ExpertDecoder):
    """Whose layers see all positions: of a part of them an expert would take more."""

    layer = NormedLayer


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


SHORT = {
    "short: context, tensor, experts": row(
        ExpertDecoder, [{"context": 2, "tensor": 2, "expert": 2}], TWO_IDS, rate=0.01
    ),
    "context, stages, experts": row(
        ListedDecoder,
        [{"context": 2, "pipeline": 2, "expert": 2, "micro_batches": 2, "schedule": "zb-h1"}], TWO_IDS,
        rate=0.01,
    ),
    "short: context, stages": row(
        DECODER, [{"context": 2, "pipeline": 2, "micro_batches": 2, "zero": 1}], TWO_IDS,
        options={"check": True},
    ),
}  # fmt: skip


# ---- what is refused ----


def layer_of_experts() -> nn.Module:
    return expert_models.Layer(expert_models.experts())


def two_experts() -> nn.Module:
    model: Any = ExpertDecoder()
    for layer in model.layers:
        for name, value in layer.experts.named_parameters():
            setattr(layer.experts, name, nn.Parameter(value[:2].detach()))
        layer.experts.num_experts = 2
    return model


def in_a_chain() -> nn.Module:
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))


class Pair(expert_models.Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.mean()


class Apart(ListedDecoder):
    layer = staticmethod(lambda: Pair(expert_models.experts()))

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            found = layer(x)
            x = found[0] if isinstance(found, tuple) else found
        return x @ self.words.weight.T


SPREAD = up.Plan(data=2, tensor=2, expert=2)
OWN_LIST = r'Layer itself calls the experts of "experts".* Put the list, .* into a module of their own'
DIVIDES = r'"layers\.0\.experts" \(Stacked\) has 2 experts, which expert=2 x tensor=2 does not divide'
PIECES = "context=2 cuts the stages of a pipeline from the program of Sequential: leave out pieces="
A_TUPLE = r'"layers\.0\.experts": "layers\.0" returns a tuple; where tensor'
REFUSED = {
    "short: a list in the model itself": row(
        layer_of_experts, (), [(torch.zeros(4, expert_models.WIDTH),) * 2], refused={OWN_LIST: [SPREAD]}
    ),
    "short: too few experts": row(two_experts, (), refused={DIVIDES: [SPREAD]}, sample=None),
    "short: pieces": row(
        in_a_chain, (), refused={PIECES: [up.Plan(context=2, pipeline=2)]}, sample=None,
        options={"pieces": list},
    ),
    "a layer that returns a tuple": row(Apart, (), refused={A_TUPLE: [SPREAD]}),
}  # fmt: skip


# ---- pairs of axes ----

CONTEXT_TENSOR = {"context": 2, "tensor": 2}
CONTEXT_STAGES = {"context": 2, "pipeline": 2}
BY_HAND = {"blocks.*.up": "column", "blocks.*.down": "row"}
DENSE = {
    "context, tensor": row(
        DECODER,
        [CONTEXT_TENSOR, {**CONTEXT_TENSOR, "zero": 3, "recompute": True, "micro_batches": 2}],
        holds=lambda run: run.cut.modules, sample=None,
    ),
    "context, tensor by hand": row(
        DECODER, [CONTEXT_TENSOR, {"tensor": 2, "pipeline": 2}], options={"cuts": BY_HAND},
        holds=lambda run: all(path.endswith((".up", ".down")) for path in run.cut.modules),
    ),
    "context, tensor of an encoder": row(Encoder, [CONTEXT_TENSOR], CLASSES, contexts.of_class),
    "context, stages": row(
        DECODER,
        [
            {**CONTEXT_STAGES, "micro_batches": 2},
            {
                **CONTEXT_STAGES, "zero": 3, "recompute": True, "micro_batches": 4, "schedule": "interleaved",
            },
            {**CONTEXT_STAGES, "micro_batches": 4, "schedule": "zb-h1"},
            {**CONTEXT_STAGES, "micro_batches": 4, "schedule": "zbv", "zero": 1},
        ],
    ),
    "context, stages of an encoder": row(Encoder, [CONTEXT_STAGES], CLASSES, contexts.of_class),
    "context, stages of what is tied": row(TiedDecoder, [{**CONTEXT_STAGES, "zero": 1}]),
}  # fmt: skip


def on_four_ranks(run: up.Run) -> bool:
    """A row goes from one rank of its tensor group."""
    mine = [p for name, p in run.model.named_parameters() if ".experts." in name]
    return run.cut.modules and {p.device_mesh.shape[-1] for p in mine} == {4}


def scatters(run: up.Run) -> bool:
    return any(move.kind == "scatter" for moves in run.cut.moves.values() for move in moves.values())


def of_experts(make: Make, plans: Any, **more: Any) -> Row:
    return row(make, [{"expert": 2, **plan} for plan in plans], **{"rate": 0.01, **more})


SHARDED = {"zero": 3, "recompute": True}
EXPERT_STAGES = [{"data": 2, "pipeline": 2, "micro_batches": 2, **more} for more in ({}, SHARDED)]
SPLIT = [
    {"pipeline": 2, "micro_batches": 4, "schedule": schedule, "zero": zero, axis: 2}
    for schedule, zero in (("zb-h1", 0), ("zbv", 1))
    for axis in ("data", "context")
]
EXPERTS = {
    "experts, tensor": of_experts(
        expert_models.stacked,
        [{"data": 2, "tensor": 2}, {"data": 2, "tensor": 2, "micro_batches": 2, **SHARDED}],
        given=UNEVEN, loss=expert_models.loss, sample=None, rate=0.1, holds=on_four_ranks,
    ),
    **{
        f"experts, stages, {make.__name__}": of_experts(
            make, EXPERT_STAGES, given=GIVEN, loss=expert_models.loss, sample=None, rate=0.1
        )
        for make in (expert_models.stacked, expert_models.listed)
    },
    "experts, context": of_experts(
        ExpertDecoder,
        [
            {"data": 2, "context": 2}, {"data": 2, "context": 2, "expert": 4, **SHARDED},
            {**CONTEXT_TENSOR, "micro_batches": 2},
        ],
    ),
    "a list of experts": of_experts(
        ListedDecoder,
        [
            {"data": 2, "tensor": 2}, {"data": 2, "tensor": 2, "micro_batches": 2, **SHARDED},
            {"data": 2, "context": 2, "zero": 1}, {"data": 2, "context": 2, "expert": 4, **SHARDED},
            {"context": 4}, {**CONTEXT_TENSOR, "zero": 3}, {"data": 2, "pipeline": 2, "micro_batches": 2},
            {**CONTEXT_STAGES, "zero": 3},
        ],
    ),
    "a list of experts, counted": of_experts(CountedDecoder, [{"context": 4, "expert": 4}, CONTEXT_TENSOR]),
    "a list over tensor ranks": row(
        ListedDecoder, [{"tensor": 4}, {"tensor": 2, "pipeline": 2}, {"data": 2, "pipeline": 2, "zero": 3}],
        rate=0.01, options={"experts": {"layers.*.experts": "list"}},
    ),
    # a pass of gradients of inputs runs the exchanges; that of weights runs none, or all of them again
    "experts, split backwards": of_experts(ExpertDecoder, SPLIT),
    "a list, split backwards": of_experts(ListedDecoder, SPLIT),
    "counted, split backwards": of_experts(  # a capacity counts the rows of a data rank
        CountedDecoder, [{**plan, "micro_batches": 1} for plan in SPLIT if "context" in plan]
    ),
    # a layer of experts takes all positions; what is between layers has those of its tensor rank
    **{
        f"sequences, {make.__name__}": of_experts(
            make, [{"data": 2, "tensor": 2, "sequence": True, "zero": zero} for zero in (0, 3)],
            holds=scatters,
        )
        for make in (ExpertDecoder, ListedDecoder)
    },
}  # fmt: skip


# ---- models of Hugging Face: of each family the axes together that its attention allows ----


def sdpa(make: Make) -> Make:
    def made() -> nn.Module:
        model: Any = make()
        if model._supports_sdpa:  # gpt-oss has sinks, and writes attention out
            model.set_attn_implementation("sdpa")
        return model

    return made


def balanced() -> nn.Module:
    """Whose loss has a product of means over the rows of a data rank."""
    model: Any = sdpa(expert_models.HUGGING_FACE["mixtral"])()
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5
    model.router_aux_loss_coef = 0.5
    return model


WITH_EXPERTS = (
    {"data": 2, "tensor": 2}, {"data": 2, "tensor": 2, **SHARDED},
    {"data": 2, "pipeline": 2, "micro_batches": 2, "zero": 1}, {"data": 2, "context": 2},
    {"data": 2, "tensor": 2, "sequence": True},
    {**CONTEXT_STAGES, "micro_batches": 2, "schedule": "zb-h1"},
)  # fmt: skip
WITHOUT = (
    {"data": 2, "pipeline": 2, "micro_batches": 2, "zero": 3}, {"data": 2, "context": 2, "zero": 1},
    CONTEXT_TENSOR, {**CONTEXT_STAGES, "micro_batches": 2, "schedule": "zbv"},
)  # fmt: skip


def of_hugging_face() -> dict[str, Row]:
    half = GIVEN[: STEPS // 2]
    ids = torch.randint(64, (STEPS, 4, 25), generator=torch.Generator().manual_seed(5))
    logits = [(each[:, :-1], each[:, 1:]) for each in ids]
    tokens = [{"input_ids": x, "labels": x} for x, _ in GIVEN]
    rows = {
        f"{kind}, context, tensor": row(
            partial(hugging_face, kind), [CONTEXT_TENSOR, {**CONTEXT_TENSOR, "zero": 3, "micro_batches": 2}],
            logits, sample=None,
        )
        for kind in ("Llama", "GPT2", "Qwen2")
    }  # fmt: skip
    for name, make in expert_models.HUGGING_FACE.items():
        plans = [*({"expert": 2, **plan} for plan in WITH_EXPERTS), *WITHOUT]
        sample = {"input_ids": half[0][0]}
        rows[name] = row(sdpa(make), plans, half, expert_models.loss, sample=sample, rate=0.02)
    plans = [up.Plan(data=2, expert=2, **{axis: 2}) for axis in ("tensor", "pipeline", "context")]
    whole = row(balanced, plans, tokens, None, options={"weigh": "rows"})
    rows["a balance loss"] = whole._replace(compare={"state": True, "parts": 2})
    return rows


TABLE = SHORT | REFUSED | DENSE | EXPERTS | (of_hugging_face() if sweep.HAVE_TRANSFORMERS else {})


# ---- what a row does not say ----


def check_predictions_of_stages(folder: Path) -> None:
    plan = up.Plan(**CONTEXT_STAGES, micro_batches=2)
    run = same(plan, DECODER, IDS[:2], contexts.mean, sample=IDS[0][0])
    run.model.eval()
    (x, y), *_ = run.shard(IDS)
    assert abs(contexts.mean(run.predict(x), y).item() - run.evaluate((x, y))) < 1e-5


def check_draws_of_context_with_tensor(folder: Path) -> None:
    """Dropout differs between tensor ranks in cut regions only: what is whole stays equal."""
    for make, given, loss in (
        (partial(Decoder, 4, 2, 0.2), IDS[:3], contexts.mean),
        (partial(Encoder, 0.2), CLASSES[:3], contexts.of_class),
    ):
        run = begun(up.Plan(**CONTEXT_TENSOR), make, loss, optimizer=sgd, sample=given[0][0])
        losses = [run.step(batch) for batch in run.shard(given)]
        whole = [run.evaluate(batch) for batch in run.shard(given[:1])]
        assert all(torch.tensor([*losses, *whole]).isfinite())
        assert apart(run) < 1e-5, apart(run)


def check_stages_are_compared(folder: Path) -> None:
    """check=True: what stages return is compared with a copy of the model, and what is wrong is an error."""
    decoder = partial(Decoder, 4, 2, 0.1)
    more = {"optimizer": sgd, "sample": IDS[0][0], "check": True}
    for axes in ({**CONTEXT_STAGES, "zero": 1}, {"context": 4}):
        run = begun(up.Plan(**axes), decoder, contexts.mean, **more)
        assert run.step(IDS[0]) > 0
        assert all(module.training for module in run.model.modules())
    plan = up.Plan(data=2, pipeline=2, expert=2)
    run = begun(plan, expert_models.stacked, expert_models.loss, optimizer=sgd, check=True)
    assert [run.step(batch) for batch in run.shard(GIVEN[:2])]
    run = begun(up.Plan(pipeline=4), decoder, contexts.mean, **more)
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if name == "blocks.1.up.weight" and not parameter.is_meta:
                parameter.mul_(2)
    # or, where a rank comes too late: the run ends, with this text
    says = r"does not compute what Decoder does: tensor 0 of its output differs"
    with pytest.raises((ValueError, RuntimeError), match=says):
        run.step(IDS[0])
