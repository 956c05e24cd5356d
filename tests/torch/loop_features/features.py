"""What surrounds a step in a user's loop. Each feature yields numbers and tensors that no plan may change.

A function takes the loops of `loops.py`. Its docstring is its row in the table of docs/features.md.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import unisono.parallel as up
from loop_features.feature_loops import IGNORED, Loops, adamw
from loop_features.feature_models import (
    Normed,
    SharedProducts,
    Text,
    adapted,
    padded,
    texts,
    token_loss,
    vectors,
)

Shown = Iterator[Any]
Feature = Callable[[Loops], Shown]


def losses(run: Any, batches: Any) -> list[float]:
    return [run.step(batch) for batch in run.shard(batches)]


def training(loops: Loops) -> Shown:
    """losses, weights, evaluation, outputs of a training"""
    run = loops.start()
    yield losses(run, texts(3))
    run.model.eval()
    yield [run.evaluate(batch) for batch in run.shard(texts(1, seed=2))]
    yield loops.outputs(run, texts(1, seed=2)[0][0])
    run.model.train()
    yield losses(run, texts(1))
    yield run.state_dict()


def schedules(loops: Loops) -> Shown:
    """learning-rate schedules"""
    run = loops.start(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    warm = lr_scheduler.LinearLR(run.optimizer, 0.1, total_iters=2)
    schedule = lr_scheduler.SequentialLR(
        run.optimizer, [warm, lr_scheduler.CosineAnnealingLR(run.optimizer, 3)], [2]
    )
    for batch in run.shard(texts(4)):
        yield run.step(batch)
        schedule.step()
        yield schedule.get_last_lr()
    run = loops.start(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    plateau = lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=0, threshold=0.5)
    for batch in run.shard(texts(4)):
        loss = run.step(batch)
        plateau.step(loss)
        yield loss, plateau.get_last_lr()


def several_optimizers(loops: Loops) -> Shown:
    """several optimizers"""

    def both(parameters: Any) -> list[torch.optim.Optimizer]:
        tables = [one for name, one in parameters.named.items() if "words" in name or "positions" in name]
        others = [one for one in parameters if all(one is not table for table in tables)]
        return [torch.optim.SGD([{"params": tables}], lr=0.1), adamw([{"params": others}])]

    run = loops.start(optimizer=both)
    schedule = lr_scheduler.StepLR(run.optimizer[0], 1, gamma=0.5)
    for batch in run.shard(texts(3)):
        yield run.step(batch)
        schedule.step()


def groups(loops: Loops) -> Shown:
    """parameter groups by name"""

    def grouped(parameters: Any) -> torch.optim.Optimizer:
        decayed = [one for name, one in parameters.named.items() if name.endswith("weight") and one.ndim > 1]
        others = [one for one in parameters if all(one is not other for other in decayed)]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}],
            lr=1e-3,
            eps=1e-3,
        )

    run = loops.start(optimizer=grouped)
    yield losses(run, texts(3))
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5
    yield losses(run, texts(2))


def other_optimizers(loops: Loops) -> Shown:
    """SGD with momentum, Adagrad, RMSprop, NAdam"""
    for make in (
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
        lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, centered=True),
        lambda parameters: torch.optim.NAdam(parameters, lr=1e-3, foreach=False),
    ):
        yield losses(loops.start(optimizer=make), texts(2))


def adafactor(loops: Loops) -> Shown:
    """Adafactor"""
    run = loops.start(optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2))
    yield losses(run, texts(3))


def muon(loops: Loops) -> Shown:
    """Muon for the matrices of blocks"""
    yield losses(loops.start(optimizer=muon_and_adamw), texts(3))


def muon_and_adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    matrices = [one for name, one in parameters.named.items() if one.ndim == 2 and "blocks" in name]
    others = [one for one in parameters if all(one is not matrix for matrix in matrices)]
    return [torch.optim.Muon([{"params": matrices}], lr=0.02), adamw([{"params": others}])]


class SignDescent(torch.optim.Optimizer):
    """A user's own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.1)
                norm = parameter.norm().clamp(min=1e-3)
                parameter.add_(mean / mean.norm().clamp(min=1e-6) * norm, alpha=-group["lr"])


def own_optimizer(loops: Loops) -> Shown:
    """an optimizer of your own, which takes norms; hooks of its step"""
    run = loops.start(optimizer=lambda parameters: SignDescent(parameters, 0.02))
    seen: list[int] = []
    run.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    yield losses(run, texts(3))
    yield len(seen)


def averages(loops: Loops) -> Shown:
    """averaged weights, `up.EMA`"""
    run = loops.start()
    average = loops.ema(run, 0.8)
    for batch in run.shard(texts(3)):
        run.step(batch)
        average.update()
    with average.applied():
        yield [run.evaluate(batch) for batch in run.shard(texts(1))]
        yield run.state_dict()
    yield losses(run, texts(1))


def unfreezing(loops: Loops) -> Shown:
    """freezing and unfreezing between steps"""
    run = loops.start(prepare=lambda model: model.blocks.requires_grad_(False))
    if not loops.planned:  # the optimizer has all of them
        run.model.requires_grad_(True)
        run.optimizer = adamw(run.model.parameters())
        run.model.blocks.requires_grad_(False)
    for number, batch in enumerate(run.shard(texts(5))):
        run.model.blocks[2:].requires_grad_(number >= 2)
        run.model.words.requires_grad_(number < 3)
        yield run.step(batch)
    yield run.state_dict()


def adapters(loops: Loops) -> Shown:
    """adapters in low rank beside frozen layers"""
    run = loops.start(adapted)
    yield losses(run, texts(3))
    yield run.state_dict()


def scalars(loops: Loops) -> Shown:
    """a parameter without dimensions"""
    run = loops.start(lambda experts: Text(experts=experts, scalar=True))
    yield losses(run, texts(3))
    yield run.state_dict()


def tied(loops: Loops) -> Shown:
    """a tied table"""
    run = loops.start(lambda experts: Text(experts=experts, tied=True))
    yield losses(run, texts(3))
    yield run.state_dict()


def accumulation(loops: Loops) -> Shown:
    """`update=False`, with calls of other sizes"""
    run = loops.start()
    for rows in (8, 4, 12):
        batches = texts(3, rows)
        yield [run.step(batch, update=number == 2) for number, batch in enumerate(run.shard(batches))]
    yield run.steps


def own_loop(loops: Loops) -> Shown:
    """a loop of `run.backward(loss)` and `run.update()`, rows that no number divides"""
    run = loops.start(changes={"clip": 0.3})
    for batch, more in zip(run.shard(texts(3, 7)), run.shard(texts(3, 4)), strict=True):
        for inputs, targets in (batch, more):
            run.backward(token_loss(run.model(inputs), targets) / 2, rows=len(targets))
        yield float(run.update()), run.grad_norm
    yield run.state_dict()


def micro_batches(loops: Loops) -> Shown:
    """`micro_batches=2`, rows that no number divides"""
    run = loops.start(changes={"micro_batches": 2})
    yield losses(run, texts(2, 9) + texts(1, 7))


def clipping(loops: Loops) -> Shown:
    """`clip`, `run.grad_norm`"""
    run = loops.start(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0), changes={"clip": 0.3})
    for batch in run.shard(texts(3)):
        yield run.step(batch), run.grad_norm


def weighed_tokens(loops: Loops) -> Shown:
    """`weigh="tokens"`, uneven padding"""
    run = loops.start(weigh="tokens")
    yield losses(run, padded(3))
    yield [run.step(batch, update=number == 2) for number, batch in enumerate(run.shard(padded(3)))]
    yield [run.evaluate(batch) for batch in run.shard(padded(1))]


def weighed_by_a_function(loops: Loops) -> Shown:
    """`weigh=` as a function"""

    def even(logits: Any, targets: Any) -> Any:
        return token_loss(logits, targets.masked_fill(targets % 2 == 1, IGNORED))

    run = loops.start(loss=even, weigh=lambda targets: (targets % 2 == 0).sum())
    yield losses(run, texts(3))


def counted(loops: Loops) -> Shown:
    """`weigh="counted"`: a loss that returns (sum, count)"""

    def summed(logits: Any, targets: Any) -> Any:
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total, (targets != IGNORED).sum()

    run = loops.start(loss=summed, weigh="counted")
    yield losses(run, padded(3))
    yield [run.evaluate(batch) for batch in run.shard(padded(1))]


def own_loss(loops: Loops) -> Shown:
    """`loss=None`, batches that are dicts with labels"""
    batches = [{"ids": x, "labels": y} for x, y in padded(3)]
    run = loops.start(loss=None, weigh="tokens", **({"sample": batches[0]} if loops.planned else {}))
    yield losses(run, batches)
    run.model.eval()
    yield [run.evaluate(batch) for batch in run.shard(batches)]


def smoothed(loops: Loops) -> Shown:
    """`nn.CrossEntropyLoss(label_smoothing=0.1)`; soft labels of a teacher"""
    module = nn.CrossEntropyLoss(label_smoothing=0.1)
    run = loops.start(loss=lambda logits, targets: module(logits.flatten(0, 1), targets.flatten()))
    yield losses(run, texts(3))
    torch.manual_seed(5)
    teacher = Text()

    def distance(logits: Any, wanted: Any) -> Any:
        return functional.kl_div(
            logits.log_softmax(-1).flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
        )

    run = loops.start(loss=distance)
    yield losses(run, [(x, teacher(x).log_softmax(-1).detach()) for x, _ in texts(3)])


def inference_mode(loops: Loops) -> Shown:
    """evaluation and outputs within `torch.inference_mode()`, between steps"""
    run = loops.start()
    yield losses(run, texts(1))
    run.model.eval()
    with torch.inference_mode():
        yield [run.evaluate(batch) for batch in run.shard(texts(1, seed=2))]
        yield loops.outputs(run, texts(1)[0][0])
    run.model.train()
    yield losses(run, texts(2))


def few_rows(loops: Loops) -> Shown:
    """evaluation and outputs of one row"""
    run = loops.start()
    yield losses(run, texts(1))
    run.model.eval()
    yield [run.evaluate(batch) for batch in run.shard(texts(1, 1))]
    yield loops.outputs(run, texts(1, 1)[0][0])
    run.model.train()
    yield losses(run, texts(1))


class Rows(Dataset):
    """Rows of text."""

    def __init__(self) -> None:
        self._tokens = texts(1, 20)[0]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return tuple(one[index] for one in self._tokens)


def loaders(loops: Loops) -> Shown:
    """`DataLoader` with shuffle, and with a sampler, over epochs"""
    run = loops.start()
    shuffled = DataLoader(Rows(), 8, shuffle=True, drop_last=True, generator=seeded(3))
    data = run.shard(shuffled)
    for _ in run.epochs(2):
        yield [run.step(batch) for batch in data]
    drawn = WeightedRandomSampler([1.0 + n % 3 for n in range(20)], 16, generator=seeded(4))
    yield losses(run, DataLoader(Rows(), 8, sampler=drawn))
    torch.manual_seed(6)
    yield losses(run, DataLoader(Rows(), 8, shuffle=True, drop_last=True))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def resuming(loops: Loops) -> Shown:
    """save and load within an epoch: schedule, averages, place in the data"""

    def begin() -> tuple[Any, ...]:
        run = loops.start()
        loader = DataLoader(Rows(), 4, shuffle=True, drop_last=True, generator=seeded(3))
        return run, lr_scheduler.StepLR(run.optimizer, 2, 0.5), loops.ema(run, 0.8), run.shard(loader)

    run, schedule, average, data = begin()
    stopped = False
    while run.steps < 8:
        for _ in run.epochs(2):
            for batch in data:
                yield run.step(batch)
                schedule.step()
                average.update()
                if loops.planned and run.steps == 3 and not stopped:
                    stopped = True
                    break
            if stopped and run.steps == 3:
                break
        if stopped and run.steps == 3:
            kept = {"schedule": schedule, "average": average, "data": data}
            run.save(loops.folder / "resuming", also=kept)
            run, schedule, average, data = begin()
            run.load(loops.folder / "resuming", also={"schedule": schedule, "average": average, "data": data})
        else:
            break
    with average.applied():
        yield run.state_dict()


def moving(loops: Loops) -> Shown:
    """a checkpoint of another plan"""
    run = loops.start()
    yield losses(run, texts(3))
    if loops.planned:
        run.save(loops.folder / "moved")
        whole = type(loops)(loops.folder, up.Plan(data=loops.plan.ranks, zero=2))
        whole.experts = loops.experts
        run = whole.start()
        run.load(loops.folder / "moved")
    yield losses(run, texts(2, seed=2))
    if loops.planned:
        run.save(loops.folder / "back")
        run = loops.start()
        run.load(loops.folder / "back")
    yield losses(run, texts(2, seed=3))


def dropout(loops: Loops) -> Shown:
    """dropout: the same losses again, also after save and load; ranks agree"""
    if not loops.planned:
        yield 0.0
        return

    def begin() -> Any:
        return loops.start(lambda experts: Text(experts=experts, dropout=0.2))

    first, again = begin(), begin()
    wanted = losses(first, texts(4))
    found = losses(again, texts(2))
    again.save(loops.folder / "dropout")
    other = begin()
    other.load(loops.folder / "dropout")
    found += losses(other, texts(4)[2:])
    plain = losses(loops.start(), texts(1))
    assert abs(plain[0] - wanted[0]) > 1e-4, "nothing was dropped"
    yield max(abs(a - b) for a, b in zip(wanted, found, strict=True))


def recomputation(loops: Loops) -> Shown:
    """`recompute=True` and `"selective"`"""
    for kind in (True, "selective"):
        yield losses(loops.start(changes={"recompute": kind}), texts(2))


def whole_models(loops: Loops) -> Shown:
    """`run.weights()`, `run.copy_to`"""
    run = loops.start()
    yield losses(run, texts(2))
    model = Text(experts=loops.experts)
    if loops.planned:
        run.copy_to(model)
        yield {name: value for name, value in run.weights() if value is not None}
    else:
        model.load_state_dict(run.state_dict())
        yield run.state_dict()
    yield model(texts(1)[0][0])


def batch_norm(loops: Loops) -> Shown:
    """`sync_batch_norm=True`, running statistics"""
    more = {"sample": vectors(1)[0][0]} if loops.planned else {}
    run = loops.start(Normed, loss=functional.cross_entropy, changes=one_pass(loops), **more)
    yield losses(run, vectors(3))
    run.model.eval()
    yield [run.evaluate(batch) for batch in run.shard(vectors(1))]
    yield run.state_dict()


def one_pass(loops: Loops) -> dict[str, Any]:
    """BatchNorm over all rows: one micro-batch."""
    return {"sync_batch_norm": True, "micro_batches": 1}


def kept_f32(loops: Loops) -> Shown:
    """`precision="bf16"`, `keep_f32=("norms", ...)`"""
    run = loops.start(changes={"precision": "bf16", "keep_f32": ("norms", "head")})
    yield losses(run, texts(3))


def fp16(loops: Loops) -> Shown:
    """`precision="fp16"`, the scale of the loss"""
    run = loops.start(changes={"precision": "fp16"})
    yield losses(run, texts(3))
    yield run.skipped


def compiled(loops: Loops) -> Shown:
    """layers that are compiled in place"""

    def compile_blocks(model: nn.Module) -> None:
        for block in model.blocks:
            block.compile(backend="eager")

    yield losses(loops.start(prepare=compile_blocks), texts(2))


def checked(loops: Loops) -> Shown:
    """`check=True`"""
    yield losses(loops.start(**({"check": True} if loops.planned else {})), texts(2))


def explained(loops: Loops) -> Shown:
    """`watch=True`, `run.explain()`, `run.trace`"""
    run = loops.start()
    for batch in run.shard(texts(2)):
        yield run.step(batch, watch=True)
    if loops.planned:
        assert str(run.explain()), "nothing is reported"
        run.trace(loops.folder / "trace.json")


def progress(loops: Loops) -> Shown:
    """`up.Progress`: tokens per second, MFU"""
    run = loops.start()
    if not loops.planned:
        yield losses(run, texts(3))
        return
    out = io.StringIO()
    shown = up.Progress(run, every=2, out=out, peak=1e9, flops=1e6)
    yield list(shown.steps(run.shard(texts(3))))
    if torch.distributed.get_rank() == 0:
        assert "tokens/s" in out.getvalue() and "MFU" in out.getvalue(), out.getvalue()


def gradient_hooks(loops: Loops) -> Shown:
    """`parameter.register_hook`"""

    def hook(model: nn.Module) -> None:
        model.head.weight.register_hook(lambda gradient: gradient * 0.5)
        model.norm.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    run = loops.start(
        prepare=hook, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5), changes={"clip": 1e3}
    )
    for batch in run.shard(texts(3)):
        yield run.step(batch), run.grad_norm


def between_steps(loops: Loops) -> Shown:
    """weights that the loop changes between steps"""
    run = loops.start()
    for batch in run.shard(texts(3)):
        yield run.step(batch)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.clamp_(-0.2, 0.2)
                parameter.mul_(0.9)
    yield run.state_dict()


def uneven_use(loops: Loops) -> Shown:
    """`uneven_use=True`"""
    yield losses(loops.start(changes={"uneven_use": True}), texts(2))


def meta(loops: Loops) -> Shown:
    """a model on the meta device"""
    with torch.device("meta"):
        model = Text(experts=loops.experts)
    if loops.planned:
        run = loops.start(lambda experts: model, seed=7, init=initialise)
    else:
        run = loops.start(lambda experts: up.materialize(model, seed=7, init=initialise))
    yield losses(run, texts(2))


def initialise(module: nn.Module) -> None:
    """Nothing is left to fill."""


def swapped(loops: Loops) -> Shown:
    """`swap="memory"`"""
    run = loops.start(changes={"swap": "memory"})
    yield losses(run, texts(3))
    if loops.planned:
        run.close()


def compressed(loops: Loops) -> Shown:
    """`compression=up.PowerSGD()`, exact at first"""
    run = loops.start(changes={"compression": up.PowerSGD(rank=2)})
    yield losses(run, texts(3))


def meetings(loops: Loops) -> Shown:
    """`local_steps=1, outer="average"`"""
    run = loops.start(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        changes={"local_steps": 1, "outer": "average"},
    )
    losses(run, texts(2))
    yield run.state_dict()


def strategies(loops: Loops) -> Shown:
    """`up.shard`: strategies over the tensor axis, beside what the axis cuts"""
    k = loops.plan.tensor if loops.planned else 1
    made: Any = [torch.matmul, torch.matmul]
    if loops.planned:
        rows, columns = (up.shard(torch.matmul, cuts) for cuts in (((k, 1, 1), (1, 1)), ((1, 1, 1), (1, k))))
        made = [rows, lambda x, weight: up.whole(columns(x, weight))]
    run = loops.start(lambda experts: SharedProducts(*made, experts=experts))
    yield losses(run, texts(3))
    yield run.state_dict()


FEATURES: dict[str, Feature] = {
    one.__name__: one
    for one in (
        training, schedules, several_optimizers, groups, other_optimizers, adafactor, muon, own_optimizer,
        averages, unfreezing, adapters, scalars, tied, accumulation, own_loop, micro_batches,
        clipping, weighed_tokens, weighed_by_a_function, counted, own_loss, smoothed, inference_mode,
        few_rows,
        loaders, resuming, moving, dropout, recomputation, whole_models, batch_norm, kept_f32, fp16,
        compiled, checked, explained, progress, gradient_hooks, between_steps, uneven_use, meta, swapped,
        compressed, meetings, strategies,
    )
}  # fmt: skip
LOW = {"kept_f32", "fp16", "muon"}
"""In low precision, as Muon's products of matrices are, too."""
