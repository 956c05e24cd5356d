"""Pipelines of models that no rule knows: their stages are cut from what they do. On two ranks."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import swept
from parallel.adversarial import Straight
from parallel.plain_training import adamw, same, seeded, under
from parallel.run_features import in_group

WIDTH, WORDS, TIME = 16, 12, 6
PIPELINE = up.Plan(pipeline=2, micro_batches=2)
SCHEDULES = (
    PIPELINE,
    up.Plan(pipeline=2, micro_batches=3, schedule="gpipe"),
    up.Plan(pipeline=2, micro_batches=2, schedule="interleaved"),
    up.Plan(pipeline=2, micro_batches=4, schedule="zb-h1"),
    up.Plan(pipeline=2, micro_batches=4, schedule="zbv"),
    up.Plan(pipeline=2, micro_batches=2, recompute=True),
)


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


def check_connections_dicts_and_ties_under_every_schedule(folder: Path) -> None:
    for plan in SCHEDULES:
        run = same(plan, Skips, batches(), with_aux, sample=batches(1)[0][0])
    table = str(run.stages).splitlines()
    assert table[0].split()[:2] == ["stage", "from"]
    assert "the beginning" in table[1]
    assert "blocks." in table[2]


def check_other_shapes_and_evaluation(folder: Path) -> None:
    """Batches of other lengths, fewer rows, and an evaluation run programs of their own."""
    mixed = [*batches(1), *batches(1, time=4), *batches(1, rows=5), *batches(1)]
    run = same(PIPELINE, Skips, mixed, loss, sample=mixed[0][0])
    run.model.eval()
    first = run.evaluate(mixed[1])
    assert first == run.evaluate(mixed[1])
    run.model.train()


class Shared(nn.Module):
    """One block three times, frozen tables, and a head that a stage has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(WORDS, WIDTH), Block()
        self.head = nn.Linear(WIDTH, WORDS)
        self.table.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(4):
            x, _ = self.block(x, scale=torch.ones(()))
        return self.head(x)


def check_a_block_on_both_stages_and_frozen_parameters(folder: Path) -> None:
    given = [(inputs["ids"], targets) for inputs, targets in batches()]
    for plan in swept(SCHEDULES[::2], SCHEDULES[1::2]):
        run = same(plan, Shared, given, loss, sample=given[0][0])
        assert [tie.name for tie in run._built.ties if tie.name.startswith("block")]


def check_checkpoints_have_all_of_it(folder: Path) -> None:
    given = batches(4)
    shared: list[Any] = [str(folder)]
    torch.distributed.broadcast_object_list(shared)
    wanted = same(up.Plan(data=2), Skips, given, loss)
    losses = [wanted.evaluate(one) for one in wanted.shard(given)]
    for number, plan in enumerate((PIPELINE, SCHEDULES[4], up.Plan(data=2, zero=2))):
        run, _ = under(plan, Skips, given, loss, sample=given[0][0])
        run.save(f"{shared[0]}/{number}")
        for other in (PIPELINE, up.Plan(data=2, zero=3)):
            again = up.parallelize(seeded(Skips), other, optimizer=adamw, loss=loss, sample=given[0][0])
            again.load(f"{shared[0]}/{number}")
            found = [again.evaluate(one) for one in again.shard(given)]
            assert max(abs(a - b) for a, b in zip(losses, found, strict=True)) < 1e-5, (plan, other)


def check_a_model_on_the_meta_device(folder: Path) -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            return Meta()

    given = batches()
    results = []
    for plan in (up.Plan(data=2), PIPELINE):
        run = up.parallelize(make(), plan, optimizer=adamw, loss=loss, seed=3, sample=given[0][0])
        results.append([run.step(one) for one in run.shard(given)])
    assert max(abs(a - b) for a, b in zip(*results, strict=True)) < 1e-5, results


class Meta(Skips):
    def reset_parameters(self) -> None:
        self.start.data.fill_(0.1)
        self.gain.data.fill_(1.0)
        self.steps.copy_(torch.linspace(0.5, 1.0, TIME).unsqueeze(-1))


class Placeholders(Shared):
    """Values of an image stand where the ids are 1; the program checks how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Linear(3, WIDTH)

    def forward(self, *, ids: Tensor, image: Tensor) -> Tensor:
        seen, places = self.seen(image), ids == 1
        torch._check_tensor_all(places.sum() * WIDTH == seen.numel(), lambda: "too few places")
        x = self.table(ids).masked_scatter(places[..., None], seen)
        for _ in range(4):
            x, _ = self.block(x, scale=torch.ones(()))
        return self.head(x)


def check_what_a_program_checks_about_values(folder: Path) -> None:
    def one(seed: int) -> Any:
        torch.manual_seed(seed)
        ids = torch.randint(2, WORDS, (8, TIME))
        ids[:, 1:3] = 1
        return {"ids": ids, "image": torch.randn(8, 2, 3)}, ids.roll(1, 1)

    given = [one(seed) for seed in range(3)]
    for plan in (PIPELINE, up.Plan(tensor=2)):
        run = same(plan, Placeholders, given, loss, sample=given[0][0])
        assert run.cut is None or run.cut.parameters[0]
    run = up.parallelize(seeded(Placeholders), PIPELINE, optimizer=adamw, loss=loss, sample=given[0][0])
    few = given[1][0] | {"ids": given[1][0]["ids"].clamp(min=2)}
    with pytest.raises((RuntimeError, ValueError), match="check of the model's own fails|cannot be used"):
        run.step((few, given[1][1]))


# ---- what cannot be ----


class Inner(Shared):
    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids)
        for _ in range(4):
            x = self.between(self.block(x, scale=torch.ones(()))[0])
        return self.head(x)


class OwnFunction(Inner):
    def between(self, x: Tensor) -> Tensor:
        return Straight.apply(x)


class Cast(Inner):
    def forward(self, ids: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids)


class Keeps(Inner):
    def between(self, x: Tensor) -> Tensor:
        self.kept = x.mean()
        return x


class Writes(Inner):
    def forward(self, ids: Tensor) -> Any:
        ids.clamp_(max=5)
        return super().forward(ids)


class Counts(Inner):
    calls = 0

    def between(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * 2.0 if self.calls > 4 else x


class Anneals(Inner):
    """The same operators with other numbers, from call to call."""

    factor = 1.0

    def between(self, x: Tensor) -> Tensor:
        self.factor = self.factor * 0.9
        return x * self.factor


class Hides(Inner):
    def forward(self, ids: Tensor) -> Any:
        return type("Result", (), {"logits": super().forward(ids)})()


class Other(Inner):
    """Shorter rows run another module."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Block()

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids)
        for _ in range(4):
            block = self.block if ids.shape[1] > 4 else self.second
            x = block(x, scale=torch.ones(()))[0]
        return self.head(x)


REFUSED = (
    (OwnFunction, 'a stage can begin.*"" stays whole: it runs a torch.autograd.Function of its own'),
    (Cast, "under autocast"),
    (Keeps, 'Keeps keeps a tensor in "kept", at .*program_stages.py.*return it from the model'),
    (Writes, "Writes writes into its input"),
    (Counts, 'Counts changes "calls" while it runs'),
    (Anneals, 'Anneals changes "factor" while it runs'),
    (Hides, "Hides returns no tensors, or objects that hide them"),
)


def check_what_cannot_be_cut_into_stages_is_refused(folder: Path) -> None:
    given = [(inputs["ids"], targets) for inputs, targets in batches(1)]
    for make, says in REFUSED:
        with pytest.raises(ValueError, match=says) as caught:
            under(PIPELINE, make, given, loss, sample=given[0][0])
        print(caught.value, flush=True)
    with pytest.raises(ValueError, match="counts pieces, and Inner has none"):
        under(dataclasses.replace(PIPELINE, cuts=(1,)), Inner, given, loss, sample=given[0][0])
    same(PIPELINE, Inner, given, loss)  # its inputs are guessed
    run, _ = under(PIPELINE, Other, given, loss, sample=given[0][0])
    with pytest.raises(ValueError, match="this batch runs another program"):
        run.step((given[0][0][:, :3], given[0][1][:, :3]))
    run.step(given[0])


class Tuned(Inner):
    """Numbers that the user changes between steps; a tensor that is written down, and written into."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.config = 1.0, SimpleNamespace(scales=[1.0, 1.0], shift=0.0)

    def between(self, x: Tensor) -> Tensor:
        total = torch.tensor(0.5)
        total += self.config.shift
        return x * self.factor * self.config.scales[0] + total


def check_numbers_that_the_user_changes(folder: Path) -> None:
    given = [(inputs["ids"], targets) for inputs, targets in batches(2)]
    losses = []
    for plan in (up.Plan(data=2), PIPELINE):
        run = up.parallelize(seeded(Tuned), plan, optimizer=adamw, loss=loss, sample=given[0][0])
        found = []
        for step in range(14):
            run.model.factor = 1.0 - 0.05 * step
            run.model.config.scales[0] = 1.0 + 0.1 * (step // 3)
            run.model.config.shift = 0.1 * (step // 4)
            (batch,) = run.shard([given[step % 2]])
            found.append(run.step(batch))
        losses.append(found)
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-5, losses
    with pytest.raises(ValueError, match="a ndarray among the inputs of Tuned"):
        up.parallelize(
            seeded(Tuned), PIPELINE, optimizer=adamw, loss=loss, sample=(given[0][0], given[0][0].numpy())
        )


class Flagged(Inner):
    """A flag decides what travels between stages, with inputs of the same shapes."""

    long = False

    def forward(self, ids: Tensor) -> Any:
        x = first = self.table(ids)
        for _ in range(4):
            x = self.block(x, scale=torch.ones(()))[0]
        return self.head(x + first if self.long else x)


def check_a_flag_that_decides_what_travels(folder: Path) -> None:
    given = [(inputs["ids"], targets) for inputs, targets in batches(2)]
    losses = []
    for plan in (up.Plan(data=2), PIPELINE):
        run = up.parallelize(seeded(Flagged), plan, optimizer=adamw, loss=loss, sample=given[0][0])
        found = []
        for step in range(6):
            run.model.long = step in (1, 2, 4)
            found += [run.step(batch) for batch in run.shard([given[step % 2]])]
        losses.append(found)
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-5, losses


class Apart(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.second = Block()

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.block(self.table(ids), scale=torch.ones(()))
        return self.head(self.second(x, scale=torch.ones(()))[0])


def check_a_loss_that_takes_a_parameter_of_another_stage(folder: Path) -> None:
    def penalty(output: Any, targets: Tensor) -> Tensor:
        return loss(output, targets) + 0.01 * run.model.block.norm.weight.pow(2).sum()

    given = [(inputs["ids"], targets) for inputs, targets in batches(1)]
    run = up.parallelize(seeded(Apart), PIPELINE, optimizer=adamw, loss=penalty, sample=given[0][0])
    with pytest.raises((ValueError, RuntimeError), match="which is on another stage of the pipeline"):
        run.step(given[0])


def check_ranks_with_different_inputs_are_told(folder: Path) -> None:
    """The rows of the first batches are compared, and the shapes of all."""
    rank = torch.distributed.get_rank()
    for count, says in ((1, "give different rows"), (3, "their inputs have different shapes")):
        given = [(inputs["ids"], targets) for inputs, targets in batches(count)]
        run, _ = under(PIPELINE, Inner, given, loss, sample=given[0][0])
        with pytest.raises(ValueError, match=says):
            run.step((given[0][0][:, : 3 + rank], given[0][1][:, : 3 + rank]))


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
