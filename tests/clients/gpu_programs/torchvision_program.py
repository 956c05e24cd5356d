"""What torchvision's training scripts do, with its models and transforms: torchvision_program.py WAY.

    classification: ResNet; MixUp, CutMix, SyncBatchNorm, AMP in float16 with GradScaler, clipped gradients,
        warm-up and cosine, an exponential moving average of the model, accuracies summed over the ranks
    segmentation: DeepLabV3 with an auxiliary loss, a rate by polynomial, a confusion matrix over the ranks
    video: a 3D ResNet over clips, channels last

Batches of one process are cut over the ranks.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from report import report
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, PolynomialLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision import models
from torchvision.transforms import v2

BATCH, STEPS, CLASSES, SIDE = 16, 4, 5, 48
Batch = tuple[torch.Tensor, torch.Tensor]


class TrainingScript(NamedTuple):
    """A model, its batches and its loss. `half`: with AMP in float16."""

    model: nn.Module
    batches: Callable[[], Iterator[Batch]]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    half: bool = False


def classification() -> TrainingScript:
    mix = v2.RandomChoice([v2.MixUp(num_classes=CLASSES), v2.CutMix(num_classes=CLASSES)])
    augment = v2.Compose([
        v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip(), v2.TrivialAugmentWide(),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3), v2.RandomErasing(0.1),
    ])  # fmt: skip

    def batches() -> Iterator[Batch]:
        torch.manual_seed(1)  # each rank draws the whole batch
        for _ in range(STEPS):
            pictures = torch.randint(256, (BATCH, 3, 64, 64), dtype=torch.uint8)
            yield mix(torch.stack([augment(x) for x in pictures]), torch.randint(CLASSES, (BATCH,)))

    smooth = functools.partial(cross_entropy, label_smoothing=0.1)
    return TrainingScript(models.resnet18(num_classes=CLASSES), batches, smooth, half=True)


def segmentation() -> TrainingScript:
    model = models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True
    )
    for module in model.modules():  # its numbers would be other ones on each rank
        module.p = 0.0 if isinstance(module, nn.Dropout) else None

    def batches() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            pictures = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
            yield pictures, torch.randint(CLASSES, (BATCH, SIDE, SIDE), generator=generator)

    def loss(outputs: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs["out"], target) + 0.5 * cross_entropy(outputs["aux"], target)

    return TrainingScript(model, batches, loss)


def video() -> TrainingScript:
    def batches() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS - 2):
            clips = torch.randn(8, 3, 4, 32, 32, generator=generator)
            yield clips.contiguous(memory_format=torch.channels_last_3d), torch.arange(8) % CLASSES

    return TrainingScript(models.video.r3d_18(num_classes=CLASSES), batches, cross_entropy)


def schedule(optimizer: torch.optim.Optimizer, half: bool) -> Any:
    """Warm-up and cosine, or a polynomial."""
    if not half:
        return PolynomialLR(optimizer, total_iters=STEPS, power=0.9)
    return SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=1), CosineAnnealingLR(optimizer, STEPS)], [1]
    )


@torch.inference_mode()
def confusion(model: nn.Module, mine: slice, batches: Iterator[Batch]) -> torch.Tensor:
    """Count the predictions of each class for each class, over all ranks."""
    model.eval()
    matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.int64, device="cuda")
    for inputs, target in batches:
        made = model(inputs[mine].cuda(non_blocking=True))
        predicted = (made["out"] if isinstance(made, dict) else made).argmax(1).flatten()
        kinds = target[mine].cuda()
        kinds = (kinds.argmax(1) if kinds.is_floating_point() else kinds).flatten()
        matrix += torch.bincount(CLASSES * kinds + predicted, minlength=CLASSES**2).view_as(matrix)
    dist.barrier()
    dist.all_reduce(matrix)
    return matrix


def main(way: str) -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    torch.manual_seed(0)
    script: TrainingScript = globals()[way]()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(script.model.cuda())
    replica = DistributedDataParallel(model, device_ids=[local_rank])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=1e-4, nesterov=True)
    rates, scaler = schedule(optimizer, script.half), torch.amp.GradScaler("cuda", enabled=script.half)
    losses = []
    for inputs, target in script.batches():
        share = len(inputs) // dist.get_world_size()
        mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        with torch.autocast("cuda", enabled=script.half):
            loss = script.loss(replica(inputs[mine].cuda(non_blocking=True)), target[mine].cuda())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        rates.step()
        average.update_parameters(model)
        losses.append(loss.detach())
    matrix = confusion(average, mine, script.batches())
    assert matrix.sum() == sum(x.numel() for _, x in script.batches()) / (CLASSES if script.half else 1)
    assert torch.cuda.max_memory_allocated() > 1 << 20
    report([x.item() for x in losses])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
