"""Hugging Face's Trainer whose steps are those of a run: copy it. Loop, schedule, logs, callbacks stay.

What Accelerate would wrap is left alone: the run cuts batches and gradients. Clipping is Plan(clip=...).
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader
from transformers import Trainer

import unisono.parallel as up


class PlanTrainer(Trainer):
    """Make it with a model that is whole, and `plan=`. All ranks of the plan make one."""

    def __init__(self, *args, plan: up.Plan, **named) -> None:
        super().__init__(*args, **named)
        make, settings = self.get_optimizer_cls_and_kwargs(self.args)  # of optim= and learning_rate=
        how = {"optimizer": lambda params: make(params, **settings), "loss": None, "weigh": "tokens"}
        sample = self.data_collator([self.train_dataset[0]] * 2)
        self.run = up.parallelize(self.model, plan, sample=sample, **how)

    def get_train_dataloader(self):
        how = {"generator": torch.Generator().manual_seed(self.args.seed), "shuffle": True, "drop_last": True}
        return self._loader(self.train_dataset, self.args.train_batch_size, **how)

    def get_eval_dataloader(self, dataset=None):
        return self._loader(dataset or self.eval_dataset, self.args.eval_batch_size)

    def _loader(self, dataset, rows: int, **how):
        rows *= self.run.plan.data  # of all ranks; shard() takes those of this one
        return self.run.shard(DataLoader(dataset, rows, collate_fn=self.data_collator, **how))

    def create_optimizer(self, *_):
        self.optimizer = self.run.optimizer
        return self.optimizer

    def _wrap_model(self, model, *_, **__):
        return torch.nn.ModuleList([model])

    def training_step(self, _model, inputs, *_):
        return torch.tensor(self.run.step(inputs, update=self.accelerator.sync_gradients))

    def prediction_step(self, _model, inputs, *_, **__):
        return torch.tensor(self.run.evaluate(inputs)), None, None

    def _clip_grad_norm(self, *_):
        return torch.tensor(self.run.grad_norm or 0.0)

    def save_model(self, folder=None, _internal_call=False):
        self.run.save_pretrained(folder or self.args.output_dir)
