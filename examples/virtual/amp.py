"""Mixed precision as written for GPUs: autocast, GradScaler, checkpoints of both kinds.

unisono run -n 1 --virtual-gpus 1 examples/virtual/amp.py
"""

import io

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1))
        self.second = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


def make() -> tuple[Net, torch.optim.Optimizer, torch.amp.GradScaler]:
    model = Net().cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cuda")


def main() -> None:
    torch.manual_seed(0)
    model, optimizer, scaler = make()
    x, y = torch.randn(64, 32, device="cuda"), torch.randint(4, (64,), device="cuda")
    losses = []
    for step in range(20):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        if step == 9:
            stored = io.BytesIO()
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                },
                stored,
            )
            stored.seek(0)
            model, optimizer, scaler = make()
            state = torch.load(stored, map_location="cuda", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scaler.load_state_dict(state["scaler"])
    assert losses[-1] < losses[0]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    main()
