"""The Trainer of Hugging Face Transformers on CPU: GPT-2 from scratch, a checkpoint, evaluate.

Its list of backends is Accelerate's; a group of another backend is made before it.
"""

import tempfile

import torch
import torch.distributed as dist
from client import BACKEND, STEPS, Steps
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 32) % 64
        return {"input_ids": tokens, "labels": tokens}


class Watched(Trainer):
    """Notes each step's loss."""

    def training_step(self, *arguments, **named):
        loss = super().training_step(*arguments, **named)
        self.last = loss.detach()
        return loss


class AtStep(TrainerCallback):
    def __init__(self) -> None:
        self.steps = Steps()
        self.trainer: Watched | None = None

    def on_step_end(self, *_: object, **__: object) -> None:
        assert self.trainer is not None
        self.steps.done(self.trainer.last)


def main() -> None:
    if BACKEND != "gloo":
        dist.init_process_group(BACKEND)
    torch.set_num_threads(1)
    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo" if BACKEND == "gloo" else None,
            per_device_train_batch_size=2,
            max_steps=STEPS,
            save_steps=STEPS,
            report_to=[],
            disable_tqdm=True,
        )
        at_step = AtStep()
        trainer = Watched(
            model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens(), callbacks=[at_step]
        )
        at_step.trainer = trainer
        trainer.train()
        trainer.evaluate(Tokens())
        dist.barrier()
    model = trainer.accelerator.unwrap_model(trainer.model)
    at_step.steps.report(model.transformer.wte.weight.detach())


if __name__ == "__main__":
    main()
