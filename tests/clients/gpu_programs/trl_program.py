"""trl's trainers of a tiny model: supervised fine-tuning (sft), and GRPO, which samples and rewards texts.

trl_program.py sft|grpo GPUS. GRPO's prompts have one length: padding depends on the other rows of a rank.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

BATCH, STEPS, WORDS, NEW = 8, 3, 60, 6
RANK = int(os.environ.get("RANK", "0"))


class SamplesByRow(LogitsProcessor):
    """Adds noise that depends on the row of the whole batch: greedy search then samples, alike on any ranks.

    Source: Gumbel 1954: the largest of log p + noise is a sample of p.
    """

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for i, row in enumerate(scores):
            place = (RANK * len(scores) + i) * 1000 + tokens.shape[1]
            noise = torch.rand(row.shape, generator=torch.Generator().manual_seed(place))
            row -= (-noise.clamp(1e-6, 1 - 1e-6).log()).log().to(row)
        return scores


class TinyModel(LlamaForCausalLM):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["generation_config"].do_sample = False
        return super().generate(*args, **kwargs, logits_processor=[SamplesByRow()])


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(WORDS))]
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def even_words(completions: list[str], **_: Any) -> list[float]:
    """The reward: the part of words with an even number."""
    return [
        sum(int(word[1:]) % 2 == 0 for word in text.split() if word[0] == "w") / NEW for text in completions
    ]


def main(kind: str, gpus: int) -> None:
    torch.manual_seed(0)
    words = tokenizer()
    model = TinyModel(
        LlamaConfig(
            vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    lengths = [8 if kind == "grpo" else 6 + n % 5 for n in range(BATCH * STEPS)]
    drawn = [torch.randint(WORDS, (length,), generator=draw).tolist() for length in lengths]
    texts = [" ".join(f"w{i}" for i in numbers) for numbers in drawn]
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "output_dir": folder, "per_device_train_batch_size": BATCH // gpus, "max_steps": STEPS,
            "logging_steps": 1, "report_to": "none", "bf16": False, "learning_rate": 1e-2,
            "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant",
        }  # fmt: skip
        if kind == "sft":
            data = Dataset.from_dict({"text": texts})
            trainer = SFTTrainer(
                model, args=SFTConfig(**settings), train_dataset=data, processing_class=words
            )
        else:
            data = Dataset.from_dict({"prompt": texts})
            settings |= {"num_generations": 4, "max_completion_length": NEW}
            trainer = GRPOTrainer(
                model, even_words, args=GRPOConfig(**settings), train_dataset=data, processing_class=words
            )
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    fields = {"sft": ("loss", "grad_norm"), "grpo": ("reward", "entropy", "grad_norm")}[kind]
    if RANK == 0:
        print("GPU_PROGRAM " + json.dumps([each[field] for each in steps for field in fields]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
