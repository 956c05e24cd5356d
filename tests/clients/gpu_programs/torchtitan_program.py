"""torchtitan's debug model: from one seed checkpoint, on the same batches, under one way to use several GPUs.

torchtitan_program.py fsdp|tp|pp|cp|all GPUS. torchtitan runs as its users start it; this program makes what
its repository holds beside the package (a tokenizer and documents), and reads the losses from its log.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

STEPS, WORDS = 3, 2000
COMMON = (
    "--module", "llama3", "--config", "llama3_debugmodel", "--training.steps", str(STEPS),
    "--training.mixed_precision_param", "float32", "--checkpoint.enable",
    "--metrics.disable_color_printing", "--debug.seed", "0",
)  # fmt: skip
LOSS = re.compile(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)")


def degrees(way: str, gpus: int) -> dict[str, int]:
    """Return the degrees: {"tensor": 2} shards matrices over two GPUs, and parameters over the rest.

    all: pipeline x context on 4 GPUs, pipeline x context x tensor on 8; GPUs of one context shard parameters.
    """
    if way == "all":
        return {"pipeline": min(2, gpus), "context": min(2, gpus // 2 or 1), "tensor": gpus // 4 or 1}
    name = {"fsdp": "", "tp": "tensor", "pp": "pipeline", "cp": "context"}[way]
    return {name: gpus} if name else {}


def write_assets(folder: Path, length: int, batch: int, data_ranks: int) -> None:
    """Write a tokenizer, and two documents for each row of each batch, in the order of the ranks' reading."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "c4_test").mkdir()
    words = ["<s>", "</s>", *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:2]])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    draw = random.Random(0)
    documents = [
        [words[draw.randrange(2, 100)] for _ in range(length // 2 - 1)] for _ in range(2 * batch * STEPS)
    ]
    share = 2 * batch // data_ranks
    mine = [
        documents[(step * data_ranks + rank) * share :][:share]
        for rank in range(data_ranks)
        for step in range(STEPS)
    ]
    lines = [json.dumps({"text": " ".join(document)}) for each in mine for document in each]
    (folder / "c4_test" / "data.jsonl").write_text("\n".join(lines))


def train(folder: Path, ranks: int, *arguments: str) -> str:
    """Run torchtitan by torchrun; return its log."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "torchtitan.train")
    done = subprocess.run(
        [sys.executable, *launcher, *COMMON, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-6000:])
    return done.stdout + done.stderr


def main(way: str, gpus: int) -> None:
    length, batch = {"cp": (1024, 1), "all": (512, 2)}.get(way, (128, 8))  # context: in blocks of 128 tokens
    ways = degrees(way, gpus)
    data_ranks = gpus if way == "fsdp" else 1
    parallel = [
        word for name, n in ways.items() for word in (f"--parallelism.{name}_parallel_degree", str(n))
    ]
    if ways.get("pipeline", 1) > 1:  # torchtitan has no CUDA graphs with it
        parallel += ["--training.disable_cuda_graphs", "--parallelism.pipeline_parallel_schedule", "1F1B"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_assets(folder / "tests" / "assets", length, batch, data_ranks)
        train(folder, 1, "--checkpoint.create_seed_checkpoint")
        size = ("--training.seq_len", str(length), "--training.local_batch_size", str(batch // data_ranks))
        log = train(folder, gpus, *size, *parallel)
    print(log, file=sys.stderr)
    found = {int(step): (float(loss), float(norm)) for step, loss, norm in LOSS.findall(log)}
    print(
        "GPU_PROGRAM " + json.dumps([number for step in sorted(found) for number in found[step]]), flush=True
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
