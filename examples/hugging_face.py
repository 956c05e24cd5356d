"""Hugging Face's Trainer trains a Llama by a plan, with the losses of one process; its folder generates text.

    unisono run -n 2 examples/hugging_face.py --plan zero        # or: tensor, pipeline

See plan_trainer.py.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments, default_data_collator

import unisono.parallel as up
from plan_trainer import PlanTrainer

PLANS = {
    "zero": up.Plan(data=2, zero=3, clip=1.0),
    "tensor": up.Plan(tensor=2, clip=1.0),
    "pipeline": up.Plan(pipeline=2, micro_batches=2, clip=1.0),
}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ROWS, RATE = 8, 1e-2


def main(kind: str) -> None:
    dist.init_process_group("unisono")
    plan = PLANS[kind]
    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (6 * ROWS, 16))]
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **SIZES))
    alone = AutoModelForCausalLM.from_config(model.config)
    alone.load_state_dict(model.state_dict())
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    sizes = {"per_device_train_batch_size": ROWS // plan.data, "num_train_epochs": 1}
    settings = TrainingArguments("out", use_cpu=True, learning_rate=RATE, **sizes, **quiet)

    trainer = PlanTrainer(model, settings, train_dataset=data, eval_dataset=data[:ROWS], plan=plan)
    trainer.train()
    print(f"{kind}: rank {dist.get_rank()} evaluates to {trainer.evaluate()['eval_loss']:.4f}", flush=True)
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    optimizer = torch.optim.AdamW(alone.parameters(), lr=RATE, weight_decay=0.0)  # the Trainer's
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(losses))
    order = torch.Generator().manual_seed(settings.seed)
    loader = DataLoader(data, ROWS, shuffle=True, generator=order)
    for rows, found in zip(loader.batch_sampler, losses, strict=True):
        loss = alone(**default_data_collator([data[row] for row in rows])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert abs(loss.item() - found) < 1e-3, (loss.item(), found)
    prompt, saved = data[0]["input_ids"][None, :4], AutoModelForCausalLM.from_pretrained("out")
    text, wanted = (one.generate(prompt, max_new_tokens=4, do_sample=False) for one in (saved, alone))
    assert torch.equal(text, wanted)
    print(f"losses {losses[0]} to {losses[-1]} do not differ from one process's", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="zero", choices=PLANS)
    main(parser.parse_args().plan)
