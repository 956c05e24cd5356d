"""How ranks that share sequences attend to all of them: as a ring, or by an exchange of heads.

Ring: keys and values travel to the next rank while those that are there are at work; backward their gradients
travel along, in f32. Heads: four all-to-alls give each rank the whole sequence of some heads; so do four
backward. The one that sends for less time is taken, as `unisono.parallel` does.

Sources: Liu et al., Ring Attention, 2023 (arXiv:2310.01889); Jacobs et al., DeepSpeed Ulysses, 2023
(arXiv:2309.14509).
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.collectives import GroupPrices
from unisono.planner.training_plan import TrainingJob, TrainingPlan

__all__ = ["ContextExchange", "context_exchange", "sequence_part"]


def sequence_part(plan: TrainingPlan, job: TrainingJob) -> float:
    """Tokens of a micro-batch on one rank."""
    return plan.micro_batch * job.shape.sequence / plan.context


class ContextExchange(NamedTuple):
    """What attention of a layer and a micro-batch sends on one rank.

    Attributes:
        by_heads: or else as a ring.
        nbytes: of all four all-to-alls of a pass, or of the keys and values of one hop.
        pass_s: seconds of the four, or of a hop.  gradient_s: of a hop of gradients.
        hops: of a pass; 0 by heads.
        buffer_bytes: of what is sent and received.
    """

    by_heads: bool
    nbytes: float
    pass_s: float
    gradient_s: float
    hops: int
    buffer_bytes: float

    def forward_s(self, core_s: float) -> float:
        """Seconds that are waited for beside `core_s` of attention."""
        if self.by_heads or not self.hops:
            return self.pass_s
        return self.hops * max(0.0, self.pass_s - core_s / (self.hops + 1))

    def backward_s(self, core_s: float) -> float:
        """The same backward; the last hop of the gradients has nothing beside it."""
        if self.by_heads or not self.hops:
            return self.pass_s
        hop = self.pass_s + self.gradient_s
        return self.hops * max(0.0, hop - core_s / (self.hops + 1)) + self.gradient_s


def context_exchange(plan: TrainingPlan, job: TrainingJob, prices: GroupPrices) -> ContextExchange:
    """The cheaper way; a rank that shares nothing sends nothing."""
    size, stride, shape = plan.context, plan.tensor, job.shape
    if size == 1:
        return ContextExchange(True, 0.0, 0.0, 0.0, 0, 0.0)
    tokens = sequence_part(plan, job)
    keys = tokens * (shape.keys(plan.tensor) + shape.values(plan.tensor))
    hop = prices.hop_s(size, stride, keys * job.width)
    gradient = prices.hop_s(size, stride, keys * 4)
    ring = ContextExchange(False, keys * job.width, hop, gradient, size - 1, 2 * keys * (job.width + 4))
    if shape.heads // plan.tensor % size or shape.key_heads % (plan.tensor * size):
        return ring
    heads = shape.heads // plan.tensor
    parts = [tokens * heads * shape.head, tokens * heads * shape.value_head]
    parts += [tokens * shape.keys(plan.tensor), tokens * shape.values(plan.tensor)]
    sent = [part * job.width for part in parts]
    pass_s = sum(prices.collective_s("all_to_all", size, stride, nbytes) for nbytes in sent)
    exchanged = ContextExchange(True, sum(sent), pass_s, 0.0, 0, 2 * max(sent))
    ring_s = 2 * (size - 1) * hop + size * gradient
    return exchanged if 2 * pass_s <= ring_s else ring
