"""Pipelines of models that no rule knows: their stages are cut from what they do. On two ranks."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import swept
from parallel.model_table import PIPELINE, TENSOR
from parallel.rows import Row, variant
from parallel.tensor_table import Straight

WIDTH, WORDS, TIME = 16, 12, 6
SCHEDULES = (
    PIPELINE,
    up.Plan(pipeline=2, micro_batches=3, schedule="gpipe"),
    up.Plan(pipeline=2, micro_batches=2, schedule="interleaved"),
    up.Plan(pipeline=2, micro_batches=4, schedule="zb-h1"),
    up.Plan(pipeline=2, micro_batches=4, schedule="zbv"),
    up.Plan(pipeline=2, micro_batches=2, recompute=True),
)
H1, ZBV = SCHEDULES[3:5]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(
        self, x: Tensor, *, scale: Tensor, keep: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        moved = self.down(torch.tanh(self.up(self.norm(x)))) * scale
        return x + (moved if keep is None else moved * keep), {"moved": moved}


class Skips(nn.Module):
    """A dict of inputs, used early and late; connections past blocks; a tied table; parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.start = nn.Parameter(torch.ones(1, 1, WIDTH) * 0.1)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(5)])
        self.register_buffer("steps", torch.linspace(0.5, 1.0, TIME).unsqueeze(-1))

    def forward(self, *, ids: Tensor, keep: Tensor, scale: Tensor) -> dict[str, Tensor]:
        x = self.table(ids) + self.start
        kept = keep[..., None].to(x.dtype) * self.steps[: ids.shape[1]].to(x.dtype)
        early, seen = x * self.gain, []
        for number, block in enumerate(self.blocks):
            x, more = block(x, scale=scale[:, None, None], keep=kept if number % 2 else None)
            seen.append(more["moved"])
        x += early
        x[:, 0] += seen[0][:, 1]
        return {"logits": functional.linear(x * self.gain, self.table.weight), "first": seen[0]}


def batch(generator: torch.Generator, rows: int = 8, time: int = TIME) -> Any:
    ids = torch.randint(WORDS, (rows, time), generator=generator)
    keep = torch.rand(rows, time, generator=generator) > 0.2
    return {"ids": ids, "keep": keep, "scale": torch.rand(rows, generator=generator)}, ids.roll(1, 1)


def batches(count: int = 3, **more: int) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    return [batch(generator, **more) for _ in range(count)]


def loss(output: Any, targets: Tensor) -> Tensor:
    logits = output["logits"] if isinstance(output, dict) else output
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def with_aux(output: Any, targets: Tensor) -> Tensor:
    return loss(output, targets) + 0.1 * output["first"].pow(2).mean()


GIVEN = batches()
IDS = [(inputs["ids"], targets) for inputs, targets in GIVEN]


def stages(make: Any, trains: Any = (PIPELINE,), given: Any = IDS, loss: Any = loss, **more: Any) -> Row:
    return Row(make, trains, given=given, loss=loss, **more)


def shows_stages(run: up.Run) -> bool:
    head, first, second, *_ = str(run.stages).splitlines()
    return head.split()[:2] == ["stage", "from"] and "the beginning" in first and "blocks." in second


class Shared(nn.Module):
    """One block several times, frozen tables, and a head that a stage has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(WORDS, WIDTH), Block()
        self.head = nn.Linear(WIDTH, WORDS)
        self.table.weight.requires_grad_(False)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids)
        for _ in range(4):
            x = self.between(self.block(x, scale=torch.ones(()))[0])
        return self.head(x)


class Placeholders(Shared):
    """Values of an image stand where the ids are 1; the program checks how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Linear(3, WIDTH)

    def forward(self, *, ids: Tensor, image: Tensor) -> Tensor:  # type: ignore[override]
        seen, places = self.seen(image), ids == 1
        torch._check_tensor_all(places.sum() * WIDTH == seen.numel(), lambda: "too few places")
        x = self.table(ids).masked_scatter(places[..., None], seen)
        for _ in range(4):
            x, _ = self.block(x, scale=torch.ones(()))
        return self.head(x)


def with_image(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, WORDS, (8, TIME), generator=generator)
    ids[:, 1:3] = 1
    return {"ids": ids, "image": torch.randn(8, 2, 3, generator=generator)}, ids.roll(1, 1)


PLACED = [with_image(seed) for seed in range(3)]


class Tuned(Shared):
    """Numbers that the user changes between steps; a tensor that is written down, and written into."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.config = 1.0, SimpleNamespace(scales=[1.0, 1.0], shift=0.0)

    def between(self, x: Tensor) -> Tensor:
        total = torch.tensor(0.5)
        total += self.config.shift
        return x * self.factor * self.config.scales[0] + total


def tune(model: Any, step: int) -> None:
    model.factor = 1.0 - 0.05 * step
    model.config.scales[0] = 1.0 + 0.1 * (step // 3)
    model.config.shift = 0.1 * (step // 4)


class Flagged(Shared):
    """A flag decides what travels between stages, with inputs of the same shapes."""

    long = False

    def forward(self, ids: Tensor) -> Any:
        x = first = self.table(ids)
        for _ in range(4):
            x = self.block(x, scale=torch.ones(()))[0]
        return self.head(x + first if self.long else x)


def flag(model: Any, step: int) -> None:
    model.long = step in (1, 2, 4)


FOLLOWED = {
    "connections, dicts and ties": stages(
        Skips, swept(SCHEDULES[:-1:2], SCHEDULES[1:-1:2]), given=GIVEN, loss=with_aux
    ),
    "connections, recomputed": stages(Skips, SCHEDULES[-1:], given=GIVEN, loss=with_aux, holds=shows_stages),
    "a block on both stages, frozen tables": stages(
        Shared, swept(SCHEDULES[::2], SCHEDULES[1::2]),
        holds=lambda run: not run.model.block.up.weight.is_meta,
    ),
    "inputs that are guessed": stages(Shared, sample=None),
    "checks about values": stages(
        Placeholders, (PIPELINE, TENSOR), given=PLACED,
        holds=lambda run: run.cut is None or run.cut.parameters[0],
    ),
    "numbers that the user changes": stages(Tuned, given=(IDS[:2] * 7), options={"before": tune}),
    "a flag that decides what travels": stages(Flagged, given=(IDS[:2] * 3), options={"before": flag}),
}  # fmt: skip


# ---- what cannot be ----


def keeps(model: Any, x: Tensor) -> Tensor:
    model.kept = x.mean()
    return x


def counts(model: Any, x: Tensor) -> Tensor:
    model.calls = model.calls + 1
    return x * 2.0 if model.calls > 4 else x


def anneals(model: Any, x: Tensor) -> Tensor:
    """The same operators with other numbers, from call to call."""
    model.factor = model.factor * 0.9
    return x * model.factor


class Cast(Shared):
    def forward(self, ids: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids)


class Writes(Shared):
    def forward(self, ids: Tensor) -> Any:
        ids.clamp_(max=5)
        return super().forward(ids)


class Hides(Shared):
    def forward(self, ids: Tensor) -> Any:
        return type("Result", (), {"logits": super().forward(ids)})()


NO_STAGE = 'a stage can begin.*"" stays whole: it runs a torch.autograd.Function of its own'
KEPT = 'Keeps keeps a tensor in "kept", at .*stage_table.py.*return it from the model'
REFUSED = {
    f"refused {make.__name__}": stages(make, (), [(IDS[0][0].clone(), IDS[0][1])], refused={says: [PIPELINE]})
    for make, says in (
        (variant("OwnFunction", Shared, between=lambda _, x: Straight.apply(x)), NO_STAGE),
        (Cast, "under autocast"),
        (variant("Keeps", Shared, between=keeps), KEPT),
        (Writes, "Writes writes into its input"),
        (variant("Counts", Shared, between=counts, calls=0), 'Counts changes "calls" while it runs'),
        (variant("Anneals", Shared, between=anneals, factor=1.0), 'Anneals changes "factor" while it runs'),
        (Hides, "Hides returns no tensors, or objects that hide them"),
    )
} | {
    "cuts of what has no pieces": stages(
        Shared, (), refused={"counts pieces, and Shared has none": [dataclasses.replace(PIPELINE, cuts=(1,))]}
    ),
}  # fmt: skip
TABLE = FOLLOWED | REFUSED
