"""The examples for GPUs have the losses of the same scripts on the CPU, on 1, 2 and 4 virtual GPUs."""

import re
from pathlib import Path
from typing import Any

import pytest

from effort import LONG

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "virtual"
RANKS = {  # of each example, by the number of GPUs
    "ddp": {1: 1, 2: 2, 4: 4} if LONG else {2: 2},
    "amp": {1: 1},
    "fsdp2": {1: 1, 2: 2, 4: 4} if LONG else {2: 2},
    "tensor_pipeline": {4: 4},
    "one_process": {2: 1},
    "nano_gpt": {2: 2} if LONG else {},  # compiles on both devices
}
# float32 rounds at 6e-8 and the steps add up; autocast rounds other operations to float16 on the CPU.
TOLERANCE = {"amp": 2e-2, "fsdp2": 1e-3, "nano_gpt": 2e-2}
SAME = 1e-5

EXACT = (
    (r":\.\df\}", ":.9g}"),  # prints all digits of a loss
    (r"nn\.Dropout\(0\.1\)", "nn.Dropout(0.0)"),  # other random numbers
    (r"(torch\.rand\w*\([^()]*(?:\(64,\))?[^()]*), device=\"cuda\"\)", r"\1).cuda()"),
)
ON_CPU = (
    ('"nccl"', '"unisono"'),
    (r"torch\.cuda\.set_device\(.*\)", "pass"),
    (r"\.cuda\([^()]*\)", ""),
    (r', device_id=torch\.device\("cuda", local_rank\)', ""),
    (r"nn\.DataParallel\((.*), device_ids=\[0, 1\]\)", r"\1"),
    (r", device_ids=\[local_rank\]", ""),
    (r'torch\.device\("cuda".*\)\n', 'torch.device("cpu")\n'),
    (r'f?"cuda(:.*?)?"', '"cpu"'),
    (r"torch\.cuda\.(max_)?memory_allocated\(\)( - before)?", "0"),
    (r"torch\.cuda\.reset_peak_memory_stats\(\)", "pass"),
    ("value.device.index == local_rank", "value.is_cpu"),
)


def changed(text: str, *changes: tuple[str, str]) -> str:
    for pattern, by in changes:
        text = re.sub(pattern, by, text)
    return text


def losses(ended: Any) -> list[float]:
    """Return what each rank printed, in their order."""
    assert not any(ended.codes), ended.text
    printed = "\n".join(ended.printed)
    found = [float(x) for line in printed.splitlines() if "loss" in line for x in numbers(line)]
    assert found, ended.text
    return found


def numbers(line: str) -> list[str]:
    return re.findall(r"[\d.]+(?:e-\d+)?", line.partition("loss ")[2].partition(", ")[0])


def test_losses_are_those_of_the_cpu(machine: Any, subtests: pytest.Subtests):
    for name, ranks in RANKS.items():
        if machine.gpus not in ranks:
            continue
        with subtests.test(name):
            script = changed((EXAMPLES / f"{name}.py").read_text(), *EXACT)
            gpu = losses(machine.run(script, ranks[machine.gpus]))
            on_cpu = changed(script, *ON_CPU)
            assert not re.search(r'"cuda|[.]cuda\(', on_cpu), on_cpu
            cpu = losses(machine.run(on_cpu, ranks[machine.gpus]))
            assert gpu == pytest.approx(cpu, rel=TOLERANCE.get(name, SAME))


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_streams_are_checked_while_checkpoints_recompute(machine: Any):
    """Recomputation ends with an exception, on whose way tensors are let go of: the checker runs then."""
    ended = machine.run((EXAMPLES / "amp.py").read_text(), 1, TORCH_CUDA_SANITIZER="1")
    assert ended.codes == [0], ended.text
