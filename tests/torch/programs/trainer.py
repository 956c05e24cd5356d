"""Hugging Face's Trainer in one process, or examples/plan_trainer.py under a plan: writes what it logged.

`main(rank, size, folder, port, plan, case, result)`; the plan "alone" is PyTorch in one process.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unisono.parallel as up
import unisono.torch  # noqa: F401

PLANS = {
    "data": up.Plan(data=2),
    "zero3": up.Plan(data=2, zero=3),
    "tensor": up.Plan(tensor=2),
    "pipeline": up.Plan(pipeline=2, micro_batches=2),
}
STEPWISE = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
CASES: dict[str, dict[str, Any]] = {
    "schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.3, "max_grad_norm": 0.3},
    "grouped": {"train_sampling_strategy": "group_by_length", "max_steps": 5, "dataloader_drop_last": True},
    "resumed": {**STEPWISE, "gradient_accumulation_steps": 2, "max_steps": 7},
    "best": {**STEPWISE, "max_steps": 6, "load_best_model_at_end": True, "save_total_limit": 2},
}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ROWS, REPORTED = 4, ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def samples() -> list[dict[str, torch.Tensor]]:
    """28 rows, with labels that are ignored in uneven numbers."""
    found = []
    for number, row in enumerate(torch.randint(1, 64, (28, 12), generator=torch.Generator().manual_seed(0))):
        labels = row.clone()
        labels[: number % 5] = -100
        found.append({"input_ids": row, "labels": labels})
    return found


def made(plan: up.Plan | None, case: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

    set_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **SIZES))
    rows = ROWS if plan is None else ROWS // plan.data
    sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows, "num_train_epochs": 2}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    how: dict[str, Any] = {"use_cpu": True, "learning_rate": 1e-2, "adam_epsilon": 1e-3, **sizes, **quiet}
    arguments = TrainingArguments("out", **(how | CASES[case]))
    data = {"train_dataset": samples(), "eval_dataset": samples()[:7]}
    if plan is None:
        return Trainer(model, arguments, **data)
    from plan_trainer import PlanTrainer

    return PlanTrainer(model, arguments, plan=plan, **data)


def reported(trainer: Any) -> list[list[float | None]]:
    """What each entry of the log has of losses, norms and rates."""
    return [[entry.get(key) for key in REPORTED] for entry in trainer.state.log_history]


def main(rank: int, size: int, folder: Path, port: str, title: str, case: str, result: str) -> None:
    os.chdir(folder)
    os.environ.update(CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    if title != "alone":
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in here.items()}, MASTER_ADDR="127.0.0.1")
        dist.init_process_group("unisono")
    trainer = made(PLANS.get(title), case)
    trainer.train()
    trainer.evaluate()
    found = reported(trainer)
    if case == "resumed":
        trainer = made(PLANS.get(title), case)
        trainer.train(resume_from_checkpoint="out/checkpoint-2")
        found += reported(trainer)
    trainer.save_model("out/last")
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    if title != "alone":
        dist.destroy_process_group()
