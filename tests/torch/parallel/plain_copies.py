"""Whole models out of a run: plain copies to generate with, folders for from_pretrained, adapters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unisono.parallel as up
from parallel import models, sweep
from parallel.fused_saves import Fused
from parallel.fused_saves import batches as vectors
from parallel.plain_training import adamw, begun, seeded, sgd, trained
from parallel.predictions import PLANS, close

TEXT_PLANS = (
    up.Plan(data=2), up.Plan(data=2, zero=3), up.Plan(tensor=2), up.Plan(pipeline=2, micro_batches=2),
)  # fmt: skip


def run_of(plan: up.Plan, make: Any, batches: list[Any], loss: Any, *, optimizer: Any = adamw) -> up.Run:
    """Trained on batches."""
    sample = batches[0][0] if plan.tensor > 1 or make is Fused else None
    run = begun(plan, make, loss, optimizer=optimizer, sample=sample)
    for batch in run.shard(batches):
        run.step(batch)
    return run


def check_a_plain_copy_has_the_weights(folder: Path) -> None:
    batches, loss = vectors(2), nn.functional.cross_entropy
    # With one token the gradients of query and key are nothing but rounding, which Adam makes large.
    wanted = trained(Fused, batches, loss, optimizer=sgd)[0].state_dict()
    for plan in (PLANS[1], PLANS[2], PLANS[4]):
        run = run_of(plan, Fused, batches, loss, optimizer=sgd)
        plain = Fused()
        run.copy_to(plain)
        for name, value in plain.state_dict().items():
            close(value, wanted[name])
        low = Fused().to(torch.bfloat16)
        run.copy_to(low if dist.get_rank() else None)  # each rank that wants one
        if dist.get_rank():
            for name, value in low.state_dict().items():
                assert value.dtype == torch.bfloat16
                torch.testing.assert_close(value.float(), wanted[name], rtol=1e-2, atol=1e-3)
        run.step(next(iter(run.shard(batches))))


def check_models_that_get_no_weights(folder: Path) -> None:
    run = run_of(
        up.Plan(data=2, zero=3), models.mlp, models.vector_batches(1, 4), nn.functional.cross_entropy
    )
    with torch.device("meta"):
        meta = models.mlp()
    for model, says in (
        (models.mlp()[:-1], "the model of rank 1 has no '16.weight'"),
        (nn.Sequential(*models.mlp(), nn.Linear(4, 4)), "the model of rank 1 has '17.weight'"),
        (nn.Sequential(nn.Linear(16, 17), *list(models.mlp())[1:]), r"'0.weight' of shape \[17, 16\]"),
        (meta, "on the meta device"),
        (run.model, "the model of rank 1 belongs to a run"),
    ):
        with pytest.raises(ValueError, match=says):  # on all ranks, before a byte moves
            run.copy_to(model if dist.get_rank() == 1 else None)
    with pytest.raises(TypeError, match="model is a dict"):
        run.copy_to({})  # type: ignore[arg-type]
    for size in (0, "5GB", True):
        with pytest.raises(ValueError, match="shard_bytes is"):
            run.export(folder, shard_bytes=size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Sequential has no configuration of Hugging Face.*run.export"):
        run.save_pretrained(folder)
    run.copy_to(models.mlp())


def check_a_folder_that_cannot_be_written(folder: Path) -> None:
    """Rank 0's error is raised on all ranks, and the run goes on."""
    batches = models.vector_batches(1, 4)
    run = run_of(up.Plan(data=2, zero=3), models.mlp, batches, nn.functional.cross_entropy)
    place = folder / "shared"
    if dist.get_rank() == 0:
        place.write_text("no folder")
    dist.barrier()
    with pytest.raises(RuntimeError, match="rank 0 could not write .*FileExistsError"):
        run.export(place, shard_bytes=500)
    run.step(next(iter(run.shard(batches))))


def check_an_export_replaces_another(folder: Path) -> None:
    from safetensors.torch import load_file

    run = run_of(up.Plan(data=2), models.mlp, models.vector_batches(1, 4), nn.functional.cross_entropy)
    place = folder / "shared"
    for size in (10**9, 2000, 4000, 10**9):
        run.export(place, shard_bytes=size)
        if dist.get_rank() == 0:
            files = sorted(path.name for path in place.glob("*.safetensors"))
            index = place / "model.safetensors.index.json"
            assert index.exists() == (size < 10**9)
            if index.exists():
                assert sorted(set(json.loads(index.read_text())["weight_map"].values())) == files
            else:
                assert files == ["model.safetensors"]
            assert sum(len(load_file(place / name)) for name in files) == 18
        dist.barrier()


def check_text_is_generated_under_every_plan(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    batches = models.text_batches(2, 4)
    prompt = batches[0][0][:, :4]
    for make in (models.gpt2, models.llama):
        alone = trained(make, batches, models.token_loss)[0].eval()
        wanted = alone.generate(prompt, max_new_tokens=8, do_sample=False)
        for plan in TEXT_PLANS:
            run = run_of(plan, make, batches, models.token_loss)
            plain = make().eval()
            run.copy_to(plain)
            assert plain.config.use_cache
            assert torch.equal(plain.generate(prompt, max_new_tokens=8, do_sample=False), wanted), plan


def check_a_sharded_model_generates_itself(folder: Path) -> None:
    """With a cache of keys and values, and no rank that holds the model: data ranks and ZeRO."""
    if not sweep.HAVE_TRANSFORMERS:
        return
    batches = models.text_batches(2, 4)
    prompt = batches[0][0][:, :4]
    alone = trained(models.llama, batches, models.token_loss)[0].eval()
    wanted = alone.generate(prompt, max_new_tokens=8, do_sample=False)
    for plan in (up.Plan(data=2, zero=1), up.Plan(data=2, zero=3)):
        run = run_of(plan, models.llama, batches, models.token_loss)
        run.model.eval()
        mine = next(iter(run.shard([prompt])))
        found = run.model.generate(mine, max_new_tokens=8, do_sample=False, synced_gpus=True)
        assert torch.equal(found, next(iter(run.shard([wanted])))), plan
        run.model.train()
        run.step(next(iter(run.shard(batches))))


def check_text_without_a_whole_model(folder: Path) -> None:
    """Where no rank may hold the model: a prediction for each token, with tokens padded to one length."""
    if not sweep.HAVE_TRANSFORMERS:
        return
    batches = models.text_batches(2, 4)
    prompt, first, length = batches[0][0][:, :4], 4, models.TIME
    alone = trained(models.gpt2, batches, models.token_loss)[0].eval()
    wanted = alone.generate(prompt, max_new_tokens=3, do_sample=False)
    for plan in (up.Plan(tensor=2), up.Plan(pipeline=2, micro_batches=2)):
        run = run_of(plan, models.gpt2, batches, models.token_loss)
        run.model.eval()
        tokens = nn.functional.pad(prompt, (0, length - first))
        for at in range(first, first + 3):
            tokens[:, at] = run.predict(tokens)[:, at - 1].argmax(-1)
        assert torch.equal(tokens[:, : first + 3], wanted), plan


def check_transformers_reads_what_is_saved(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    import transformers

    place, batches = folder / "shared", models.text_batches(2, 4)
    for plan in TEXT_PLANS:
        run = run_of(plan, models.llama, batches, models.token_loss)
        run.save_pretrained(place, shard_bytes=20_000)
        found = transformers.AutoModelForCausalLM.from_pretrained(place).state_dict()
        wanted = models.llama()
        run.copy_to(wanted)
        assert found.keys() == wanted.state_dict().keys()
        for name, value in wanted.state_dict().items():
            assert torch.equal(found[name], value), name
        config = json.loads((place / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["dtype"] == "float32"
        body = transformers.AutoModel.from_pretrained(place)
        assert torch.equal(body.embed_tokens.weight, found["model.embed_tokens.weight"])
        dist.barrier()


def lora() -> nn.Module:
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(models.llama(), settings)


def check_adapters_of_peft(folder: Path) -> None:
    try:
        import peft
    except ImportError:
        return
    place, texts = folder / "shared", models.text_batches(3, 4)
    batches = [{"input_ids": x, "labels": x} for x, _ in texts]
    losses = []
    for plan in (up.Plan(), *TEXT_PLANS)[1:]:
        run = begun(plan, lora, None, sample=batches[0])
        losses.append([run.step(batch) for batch in run.shard(batches)])
        assert max(abs(a - b) for a, b in zip(losses[0], losses[-1], strict=True)) < 1e-5, (plan, losses)
        run.save_pretrained(place)
        assert sorted(path.suffix for path in place.iterdir()) == [".json", ".md", ".safetensors"]
        again = peft.PeftModel.from_pretrained(seeded(models.llama), place)
        wanted = seeded(lora)
        run.copy_to(wanted)
        assert again.state_dict().keys() == wanted.state_dict().keys()
        for name, value in wanted.state_dict().items():
            assert torch.equal(again.state_dict()[name], value) or "lora" not in name, name
        dist.barrier()
