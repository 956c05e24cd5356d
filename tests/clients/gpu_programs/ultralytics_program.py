"""ultralytics trains a small detector and validates it; it starts its other ranks itself.

ultralytics_program.py GPUS. All pictures are alike, and each rank has as many as one GPU: the loss of a batch
depends on its size, and so do its statistics.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
from pathlib import Path

BATCH, EPOCHS, SIZE = 4, 2, 64  # pictures for each rank


def write_data(folder: Path, pictures: int) -> Path:
    """Write pictures with two boxes each, and the file that names them."""
    import cv2
    import numpy as np

    picture = np.random.default_rng(0).integers(0, 60, (SIZE, SIZE, 3), dtype=np.uint8)
    cv2.rectangle(picture, (8, 8), (32, 40), (0, 200, 0), -1)
    cv2.rectangle(picture, (36, 20), (60, 56), (200, 0, 0), -1)
    boxes = "0 0.3125 0.375 0.375 0.5\n1 0.75 0.59375 0.375 0.5625\n"
    for part in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True)
        for i in range(
            pictures if part == "train" else 2 * pictures
        ):  # a batch of validation has twice as many
            cv2.imwrite(str(folder / "images" / part / f"{i}.png"), picture)
            (folder / "labels" / part / f"{i}.txt").write_text(boxes)
    named = folder / "data.yaml"
    named.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [left, right]\n")
    return named


def main(gpus: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"YOLO_CONFIG_DIR": name, "YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
        from ultralytics import YOLO

        still = ("hsv_h", "hsv_s", "hsv_v", "translate", "scale", "fliplr", "mosaic", "erasing")
        YOLO("yolo11n.yaml").train(
            data=str(write_data(Path(name), BATCH * gpus)), epochs=EPOCHS, imgsz=SIZE, batch=BATCH * gpus,
            nbs=BATCH * gpus,
            device=list(range(gpus)), workers=0, amp=False, plots=False, val=True, optimizer="SGD", lr0=0.01,
            warmup_epochs=0.0, auto_augment=None, project=name, name="run", exist_ok=True,
            seed=int(gpus == 1),  # it adds the rank, which is -1 on one GPU
            **dict.fromkeys(still, 0.0),
        )  # fmt: skip
        with next(Path(name).rglob("results.csv")).open() as file:
            rows = list(csv.DictReader(file))
    losses = [float(row[key]) for row in rows for key in row if key.endswith("_loss")]
    print("GPU_PROGRAM " + json.dumps(losses), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
