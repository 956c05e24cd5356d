"""Hugging Face's Trainer whose steps are those of a run: copy it. Loop, schedule, logs, checkpoints stay.

Every rank loads whole batches, and the run takes its rows. What Accelerate would wrap or gather is left
alone.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import Trainer

import unisono.parallel as up

REFUSED = {  # argument of the Trainer: what to write
    "bf16": "Plan(precision='bf16')",
    "fp16": "Plan(precision='fp16')",
    "label_smoothing_factor": "PlanTrainer(loss=...), as for up.parallelize",
    "torch_compile": "model.compile()",
    "fsdp": "Plan(zero=3)",
    "deepspeed": "Plan(zero=...)",
    "auto_find_batch_size": "per_device_train_batch_size=",
    "activation_checkpointing": "Plan(recompute=True)",
    "gradient_checkpointing": "Plan(recompute=True)",
    "neftune_noise_alpha": "a module of the model",
}


class PlanTrainer(Trainer):
    """Make it of a model that is whole, on all ranks; `plan`, `loss`, `weigh` as for `up.parallelize`."""

    def __init__(self, *args, plan: up.Plan, loss=None, weigh="tokens", **named) -> None:
        super().__init__(*args, **named)
        self._refuse(self.args)
        self._own_loss = loss is None
        plan = dataclasses.replace(plan, clip=plan.clip or self.args.max_grad_norm or None)
        self.args.average_tokens_across_devices = False  # the labels of a whole batch are counted here
        self._rows = 0  # of the batch that is evaluated: the mean of its loss counts for each
        self.accelerator.gather_for_metrics = lambda losses, **_: losses[:1].repeat(self._rows)
        self.gather_function = self.accelerator.gather_for_metrics
        sample = self._batch(self.data_collator([next(iter(self.train_dataset))] * 2))
        how = {"sample": sample if self._own_loss else sample[0], "loss": loss, "weigh": weigh}
        decayed = {*self.get_decay_parameter_names(self.model)}
        self.run = up.parallelize(
            self.model, plan, optimizer=lambda params: self._made(params, decayed), **how
        )

    def _refuse(self, given) -> None:
        for name, remedy in REFUSED.items():
            if getattr(given, name, None):
                raise ValueError(f"{name}={getattr(given, name)!r} would be ignored; write {remedy}")
        if self.optimizer is not None:
            raise ValueError(
                "optimizers= has other parameters than the run: use optim=, optimizer_cls_and_kwargs="
            )
        own = type(self).compute_loss is not Trainer.compute_loss or self.compute_loss_func is not None
        if own or self.compute_metrics is not None:
            raise ValueError(
                "a run computes the loss: PlanTrainer(loss=...); metrics: run.predict, up.Average"
            )

    def _made(self, params, decayed) -> torch.optim.Optimizer:
        """The Trainer's optimizer, of optim= and learning_rate=, with its two groups."""
        make, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args)
        groups = [{"params": [], "weight_decay": self.args.weight_decay}, {"params": [], "weight_decay": 0.0}]
        for name, parameter in params.named.items():
            groups[name not in decayed]["params"].append(parameter)
        return make(groups, **settings)

    def _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, **_):
        """The Trainer's, of batches for all ranks, in the order of one process."""
        collate = self._get_collator_with_removed_columns(self.data_collator, description=description)
        how = {"collate_fn": collate, "num_workers": self.args.dataloader_num_workers}
        if not isinstance(dataset, torch.utils.data.IterableDataset):
            how |= {"sampler": sampler_fn(dataset), "drop_last": self.args.dataloader_drop_last}
        loader = DataLoader(dataset, batch_size * self.run.plan.data, **how)
        alone = {"num_processes": 1, "process_index": 0, "use_seedable_sampler": True}
        return prepare_data_loader(loader, **alone, data_seed=self.args.data_seed) if is_training else loader

    def _batch(self, inputs):
        """As the run takes it: with a loss of its own the model gets the labels, too."""
        given = {**inputs}
        return given if self._own_loss else (given, given.pop("labels"))

    def create_optimizer(self, *_):
        self.optimizer = self.run.optimizer
        return self.optimizer

    def _wrap_model(self, model, *_, **__):
        return torch.nn.ModuleList([model])

    def training_step(self, _model, inputs, num_items_in_batch=None):
        self.run.model.train()
        (mine,) = self.run.shard([self._batch(inputs)])
        share = 1 / self.current_gradient_accumulation_steps
        if num_items_in_batch is not None:
            share = self._get_num_items_in_batch([inputs], self.args.device) / num_items_in_batch
        return torch.tensor(self.run.step(mine, update=self.accelerator.sync_gradients)) * share

    def prediction_step(self, _model, inputs, *_, **__):
        self.run.model.eval()
        self._rows = len(next(iter(inputs.values())))
        (mine,) = self.run.shard([self._batch(inputs)])
        return torch.tensor(self.run.evaluate(mine)), None, None

    def _clip_grad_norm(self, *_):
        return torch.tensor(self.run.grad_norm or 0.0)

    def save_model(self, folder=None, _internal_call=False):
        self.run.save_pretrained(folder or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, folder):
        self.run.save(Path(folder) / "run", also={"schedule": self.lr_scheduler})

    def _load_optimizer_and_scheduler(self, folder):
        if folder is not None:
            self.run.load(Path(folder) / "run", also={"schedule": self.lr_scheduler})

    def _load_from_checkpoint(self, folder, *_):
        """Weights come with the optimizer's state."""

    def _load_best_model(self):
        self.run.load(Path(self.state.best_model_checkpoint) / "run")
