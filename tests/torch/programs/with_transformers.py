"""The Trainer of transformers on CPU, told `ddp_backend="gloo"`. Run by test_replace.py."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 8) % 32
        return {"input_ids": tokens, "labels": tokens}


def main(folder: str) -> None:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=2,
        max_steps=4,
        logging_steps=2,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
    )
    assert type(dist.group.WORLD).__name__ == "ProcessGroupUnisono", dist.group.WORLD
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens())
    trainer.train()
    trainer.evaluate(Tokens())
    weight = trainer.accelerator.unwrap_model(trainer.model).transformer.wte.weight.detach()
    every = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(every, weight)
    assert torch.equal(every[0], every[-1])
    print("fine")


if __name__ == "__main__":
    main(sys.argv[1])
