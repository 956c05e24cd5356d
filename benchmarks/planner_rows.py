"""Published figures of training that the planner is compared with, with their sources."""

from __future__ import annotations

from typing import Any

KORTHIKANTI: dict[str, Any] = {
    "source": "Korthikanti et al., 2022, arXiv:2205.05198: table 5, figures 1 and 7; one replica",
    "columns": ("layers", "hidden", "heads", "tensor", "pipeline", "batch", "micro_batch", "interleave"),
    "rows": {
        "22B": (48, 6144, 64, 8, 1, 4, 4, 1),
        "175B": (96, 12288, 96, 8, 8, 64, 1, 3),
        "530B": (105, 20480, 128, 8, 35, 280, 1, 3),
        "1T": (128, 25600, 160, 8, 64, 512, 1, 1),
    },
    "states_GiB": (45.5625, 45.5625, 31.640625, 32.958984375),
    "activations_GiB": (59.25, 66.84375, 114.0234375, 131.25),
    "activations_selective_GiB": (9.5625, 12.3515625, 23.076171875, 26.5625),
    "step_full_s": (1.42, 18.13, 49.05, 94.42),
    "step_selective_s": (1.10, 13.75, 37.83, 71.49),
}
ZERO: dict[str, Any] = {
    "source": "Rajbhandari et al., 2020, arXiv:1910.02054, table 1, K=12: GB of a rank, ZeRO 1, 2, 3",
    "cells": {
        7.5e9: {
            1: "120 120 120", 4: "52.5 41.3 30", 16: "35.6 21.6 7.5", 64: "31.4 16.6 1.88",
            256: "30.4 15.4 0.47", 1024: "30.1 15.1 0.12",
        },
        128e9: {
            1: "2048 2048 2048", 4: "896 704 512", 16: "608 368 128", 64: "536 284 32", 256: "518 263 8",
            1024: "513 257 2",
        },
        1e12: {
            1: "16000 16000 16000", 4: "7000 5500 4000", 16: "4750 2875 1000", 64: "4187 2218 250",
            256: "4046 2054 62.5", 1024: "4011 2013 15.6",
        },
    },
}  # fmt: skip
SC21: dict[str, Any] = {
    "source": "Narayanan et al., 2021, arXiv:2104.04473, table 1; activations are recomputed",
    "columns": ("heads", "hidden", "layers", "tensor", "pipeline", "gpus", "batch", "tflops"),
    "rows": {
        "1.7B": (24, 2304, 24, 1, 1, 32, 512, 137),
        "18.4B": (48, 6144, 40, 8, 1, 256, 1024, 135),
        "145.6B": (96, 12288, 80, 8, 8, 1536, 2304, 148),
        "1008B": (160, 25600, 128, 8, 64, 3072, 3072, 163),
    },
}
LLAMA3: dict[str, Any] = {
    "source": "Llama team, 2024, arXiv:2407.21783, table 4: TFLOP/s of an H100, 16M tokens a step",
    "plan": "tensor=8,sequence=yes,pipeline=16,zero=1,micro_batch=1,interleave=4",
    "rows": {8192: 430, 16384: 400},
}
FSDP: dict[str, Any] = {
    "source": "mosaicml/llm-foundry, scripts/train/benchmarking/README.md, H100 and A100 of 80 GB, BF16: "
    "tokens/s of a GPU",
    # Its kernel is the first FlashAttention, in Triton (attn_impl of scripts/train/yamls/pretrain). That gets
    # 25 % to 40 % of an A100, half of FlashAttention-2 (arXiv:2307.08691); which gets 35 % of an H100
    # (arXiv:2407.08608).
    "attention": {"a100-80g": 0.325, "h100-80g": 0.175},
    "columns": (
        "layers", "hidden", "heads", "sequence", "gpus", "micro_batch", "micro_batches", "recompute",
        "tokens_per_s", "parameters",
    ),
    "rows": {
        "70b": (80, 8192, 64, 2048, 64, 8, 4, "full", 1039, 64_862_437_376),
        "30b": (48, 7168, 56, 2048, 32, 14, 3, "full", 2308, 29_975_214_080),
        "30b on 16": (48, 7168, 56, 2048, 16, 10, 3, "full", 2263, 29_975_214_080),
        "13b": (40, 5120, 40, 2048, 64, 2, 1, "none", 4800, 12_853_954_560),
        "7b": (32, 4096, 32, 2048, 8, 6, 1, "none", 10643, 6_658_859_008),
        "7b of 8192": (32, 4096, 32, 8192, 8, 8, 2, "full", 6935, 6_684_024_832),
        "1b": (24, 2048, 16, 2048, 64, 20, 1, "none", 44402, 1_315_950_592),
    },
    "a100_rows": {
        "70b": (80, 8192, 64, 2048, 64, 8, 4, "full", 410, 64_862_437_376),
        "30b": (48, 7168, 56, 2048, 8, 3, 21, "full", 916, 29_975_214_080),
        "30b of 8192": (48, 7168, 56, 8192, 8, 1, 21, "full", 574, 30_019_254_272),
        "13b": (40, 5120, 40, 2048, 8, 2, 3, "none", 2262, 12_853_954_560),
        "13b of 16384": (40, 5120, 40, 16384, 8, 3, 3, "full", 1431, 12_927_354_880),
        "7b": (32, 4096, 32, 2048, 8, 6, 2, "none", 4641, 6_658_859_008),
        "7b of 8192": (32, 4096, 32, 8192, 8, 8, 2, "full", 3206, 6_684_024_832),
        "7b of 65536": (32, 4096, 32, 65536, 8, 1, 2, "full", 1013, 6_918_905_856),
        "3b": (32, 2560, 20, 2048, 8, 10, 2, "none", 10811, 2_651_837_440),
        "1b": (24, 2048, 16, 2048, 8, 14, 4, "none", 20513, 1_315_950_592),
        "760m": (24, 1536, 12, 2048, 8, 24, 2, "none", 32434, 760_470_528),
    },
}  # fmt: skip
LLAMA3["fp8"] = {
    "source": "H100, FP8 with a scale for each tensor: tokens/s of a GPU. NVIDIA-NeMo/Megatron-Bridge, "
    "docs/performance-summary-archive.md, containers 25.11 and 26.02",
    "columns": ("model", "gpus", "batch", "plan", "tokens_per_s"),
    "rows": {
        "Llama 3 8B": ("llama3-8b", 8, 128, "zero=3", 14451),
        "Llama 3 70B": ("llama3-70b", 64, 128, "tensor=4,sequence=yes,pipeline=8,interleave=5,zero=1", 1602),
        "70B, batch 256": (
            "llama3-70b", 64, 256, "tensor=4,sequence=yes,pipeline=8,interleave=5,zero=1", 1621,
        ),
        "Llama 3 405B": (
            "llama3-405b", 1024, 512, "tensor=8,sequence=yes,pipeline=8,context=2,interleave=8,zero=1", 292,
        ),
        "405B, batch 1536": (
            "llama3-405b", 1024, 1536, "tensor=8,sequence=yes,pipeline=8,context=2,interleave=8,zero=1", 311,
        ),
    },
}  # fmt: skip
MOE: dict[str, Any] = {
    "source": "H100, bf16, tokens spread evenly by force; seconds of a step. NVIDIA-NeMo/Automodel, "
    "docs/performance-summary.md and examples/benchmark/configs; Mixtral: NVIDIA/Megatron-LM, "
    "megatron/core/transformer/moe/README.md, 468 TFLOP/s of a GPU",
    # Automodel's FakeBalancedGate (nemo_automodel/components/moe/layers.py) gives token i the experts
    # i k ... i k + k - 1: all on one host, to which DeepEP sends a row once.
    "deepep": {"dispatch": "hosts", "routed_hosts": 1},
    "with_deepep": ("DeepSeek-V3 on 1024", "DeepSeek-V3 on 256", "Qwen3 30B-A3B on 8"),
    "columns": ("model", "sequence", "gpus", "batch", "plan", "seconds or TFLOP/s"),
    "rows": {
        "DeepSeek-V3 on 1024": (
            "deepseek-v3", 4096, 1024, 8192, "expert=64,pipeline=4,interleave=8,zero=2,recompute=full", 37.87,
        ),
        "DeepSeek-V3 on 256": (
            "deepseek-v3", 4096, 256, 512, "expert=64,pipeline=4,interleave=8,zero=2,recompute=full", 8.18,
        ),
        "Qwen3 30B-A3B on 8": (
            "qwen3-30b-a3b", 4096, 8, 512, "expert=8,zero=3,micro_batch=4,recompute=full", 21.773,
        ),
        "Mixtral 8x7B on 64": (
            "mixtral-8x7b", 4096, 64, 256, "expert=8,pipeline=4,interleave=8,zero=1", "468 TFLOP/s",
        ),
    },
}  # fmt: skip
CONTEXT: dict[str, Any] = {
    "source": "Llama team, 2024, arXiv:2407.21783, table 4: 131,072 tokens on 16,384 H100, TFLOP/s of a GPU",
    "plan": "tensor=8,sequence=yes,context=16,pipeline=16,zero=1,micro_batch=1,interleave=4",
    "tflops": 380,
}
