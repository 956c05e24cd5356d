"""Data parallel training of one model of a library; batches of one process are cut over the ranks.

models_of_libraries.py timm|open_clip|torchvision GPUS
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, STEPS = 8, 3


def timm() -> tuple[nn.Module, Callable[[nn.Module, slice, torch.Generator], torch.Tensor]]:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=4)

    def loss(model: nn.Module, mine: slice, generator: torch.Generator) -> torch.Tensor:
        images = torch.randn(BATCH, 3, 32, 32, generator=generator)[mine].cuda()
        labels = torch.randint(4, (BATCH,), generator=generator)[mine].cuda()
        return nn.functional.cross_entropy(model(images), labels)

    return model, loss


def open_clip() -> tuple[nn.Module, Any]:
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP

    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32}
    text = {"context_length": 8, "vocab_size": 64, "width": 64, "heads": 2, "layers": 2}
    model = CLIP(embed_dim=32, vision_cfg=vision, text_cfg=text)
    contrast = ClipLoss(rank=dist.get_rank(), world_size=dist.get_world_size(), gather_with_grad=True)

    def loss(model: nn.Module, mine: slice, generator: torch.Generator) -> torch.Tensor:
        images = torch.randn(BATCH, 3, 32, 32, generator=generator)[mine].cuda()
        words = torch.randint(1, 64, (BATCH, 8), generator=generator)[mine].cuda()
        return contrast(*model(images, words))

    return model, loss


def torchvision() -> tuple[nn.Module, Any]:
    """A detector: nms, roi_align, and boxes of both."""
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    model = fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64
    )
    for module in model.modules():  # one batch's statistics would differ from those of its parts
        module.eval() if isinstance(module, nn.BatchNorm2d) else None

    def loss(model: nn.Module, mine: slice, generator: torch.Generator) -> torch.Tensor:
        images = [*torch.rand(BATCH, 3, 64, 64, generator=generator)[mine].cuda()]
        box = {"boxes": torch.tensor([[5.0, 5, 30, 40]]).cuda(), "labels": torch.tensor([1]).cuda()}
        return sum(model(images, [box] * len(images)).values())

    return model, loss


def main(name: str) -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model, loss_of = globals()[name]()
    replica = DistributedDataParallel(model.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    share = BATCH // dist.get_world_size()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        loss = loss_of(replica, mine, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    report(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
