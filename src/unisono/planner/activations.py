"""What a layer keeps for backward. All figures are bytes.

Source: Korthikanti et al., 2022 (arXiv:2205.05198), equations 1 to 6.
"""

from __future__ import annotations

from unisono.planner.shape import TransformerShape
from unisono.planner.training_plan import TrainingPlan

__all__ = ["layer_activations"]


def layer_activations(
    shape: TransformerShape,
    plan: TrainingPlan,
    width: int,
    *,
    experts: bool = False,
    imbalance: float = 1.0,
    inputs: int = 0,
    residual: int = 0,
) -> float:
    """Bytes that a layer keeps of one micro-batch on one rank.

    Of these, the inputs of matrix products that no other operator keeps have `inputs` bytes a value (fp8),
    and those of norms `residual` bytes (f32 under autocast).

    Example: s b h (10 + 24/t + 5 a s / (h t)) for GPT in 16 bits; with sequence and selective recomputation
    34 s b h / t.
    """
    tokens = plan.micro_batch * shape.sequence // plan.context
    values, cut = tokens * shape.hidden, plan.tensor if plan.sequence else 1
    if plan.recompute == "full":
        return (residual or width) * values / cut
    inputs, residual = inputs or width, residual or width
    # Inputs of norms and matrices; two masks.
    whole = 2 * (residual + inputs) * values + (2 * values if shape.dropout else 0)
    tensor, latent = plan.tensor, shape.latent
    heads = (shape.heads // tensor) * (shape.head + shape.value_head)
    heads += shape.keys(tensor) + shape.values(tensor)
    if latent is not None:  # inputs of their norms and of the next matrices
        heads += 2 * (latent.query_rank + latent.key_rank)
    inner = (2 if shape.gated else 1) + inputs / width
    if not experts:
        mlp = inner * shape.mlp / tensor
    else:
        rows = shape.mixed.top_k * (imbalance if plan.expert > 1 else 1.0)
        # Inputs and outputs of the experts' rows, and what the router makes of a token, in f32.
        mlp = rows * (2 * shape.hidden + inner * shape.mixed.ffn / tensor)
        mlp += inner * shape.mixed.shared_ffn / tensor + 2 * shape.mixed.count
    return whole / cut + width * tokens * (heads + mlp) + _scores(shape, plan, width)


def _scores(shape: TransformerShape, plan: TrainingPlan, width: int) -> float:
    """Softmax, its mask, and what dropout leaves of it; of fused attention one f32 per token and head."""
    rows = plan.micro_batch * (shape.sequence / plan.context) * shape.heads / plan.tensor
    if shape.attention == "fused":
        return 4 * rows
    if plan.recompute == "selective":
        return 0.0
    return rows * shape.sequence * (2 * width + 1 if shape.dropout else width)
