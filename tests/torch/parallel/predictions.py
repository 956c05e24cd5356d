"""What comes out of a run: predictions and whole weights, under every plan as in one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import unisono.parallel as up
from parallel import sweep
from parallel.fused_saves import Fused
from parallel.fused_saves import batches as vectors
from parallel.model_table import PIPELINE
from parallel.plain_training import adamw, begun, sgd, trained
from parallel.stage_table import Skips, batches, loss

PLANS = (
    up.Plan(data=2, micro_batches=2),
    up.Plan(data=2, zero=3),
    up.Plan(tensor=2),
    up.Plan(tensor=2, zero=1),
    PIPELINE,
    up.Plan(pipeline=2, micro_batches=2, schedule="zbv"),
)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def check_predictions_are_those_of_one_process(folder: Path) -> None:
    given = batches()
    model = trained(Skips, given, loss)[0].eval()
    wanted = model(**given[0][0])
    for plan in PLANS:
        run = begun(plan, Skips, loss, sample=given[0][0])
        for batch in run.shard(given):
            run.step(batch)
        run.model.eval()
        mine = next(iter(run.shard([given[0][0]])))
        found = run.predict(mine)
        first = run.mesh.row * 4 if plan.data == 2 else 0
        assert sorted(found) == ["first", "logits"]
        for key in found:
            close(found[key], wanted[key][first : first + len(mine["ids"])])
        run.model.train()
        run.step(next(iter(run.shard(given))))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x), x.sum()


def check_results_that_cannot_be_joined(folder: Path) -> None:
    def first(output: Any, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output[0], targets)

    given = vectors(1)
    for plan in (up.Plan(data=2, micro_batches=2), PIPELINE):
        run = begun(plan, Whole, first, sample=given[0][0])
        with pytest.raises(ValueError, match="predict: the model returned tensors of shapes"):
            run.predict(next(iter(run.shard(given)))[0])
        run.step(next(iter(run.shard(given))))


def check_weights_are_those_of_one_process(folder: Path) -> None:
    for make, given, cost, optimizer, plans in (
        (Skips, batches(), loss, adamw, PLANS),
        # attention to one place: the gradients of its queries are rounding, which AdamW makes steps of
        (Fused, vectors(3), nn.functional.cross_entropy, sgd, PLANS[1:4]),
    ):
        wanted = trained(make, given, cost, optimizer=optimizer)[0].state_dict()
        for number, plan in enumerate(plans):
            run = begun(plan, make, cost, sample=given[0][0], optimizer=optimizer)
            for batch in run.shard(given):
                run.step(batch)
            found = run.state_dict()
            if dist.get_rank() == 0:
                assert set(found) == set(wanted), set(found) ^ set(wanted)
                for name in found:
                    close(found[name], wanted[name])
                make().load_state_dict(found)
            else:
                assert not found
            place = folder / "shared" / f"{make.__name__}{number}"
            run.export(place, shard_bytes=3000)
            if dist.get_rank() == 0:
                files_have(place, wanted)
            run.step(next(iter(run.shard(given))))


def files_have(place: Path, wanted: dict[str, Tensor]) -> None:
    from safetensors.torch import load_file

    index = json.loads((place / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for name in set(index["weight_map"].values()):
        found |= load_file(place / name)
    assert set(found) == set(wanted)
    for name, value in found.items():
        close(value, wanted[name])
    assert not list(place.glob("*.partial"))


def check_hugging_face_reads_an_export(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    import transformers

    from parallel import models

    given = models.text_batches(2, 4)
    for plan in (up.Plan(data=2, zero=3), up.Plan(tensor=2), up.Plan(pipeline=2, micro_batches=2)):
        run = up.parallelize(models.gpt2(), plan, optimizer=adamw, loss=models.token_loss)
        for batch in run.shard(given):
            run.step(batch)
        run.export(folder / "exported")
        run.model.eval()
        wanted = run.predict(next(iter(run.shard(given)))[0])
        again = transformers.GPT2LMHeadModel.from_pretrained(folder / "exported").eval()
        found = again(next(iter(run.shard(given)))[0]).logits
        close(found, wanted)
        dist.barrier()
