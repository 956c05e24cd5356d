"""The scale of the loss under fp16. Whether a step overflowed is decided once, for all ranks; see
gradients.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScaler:
    """Grows while steps succeed, shrinks when one overflows. Scale 1 and no growth where the type needs
    none.
    """

    scale: float = 2.0**16
    growth: float = 2.0
    shrink: float = 0.5
    every: int = 2000
    succeeded: int = 0

    @classmethod
    def of(cls, precision: str) -> LossScaler:
        """Make the one for a type: fp16 is scaled, others are not."""
        return cls() if precision == "fp16" else cls(scale=1.0, growth=1.0, shrink=1.0)

    @property
    def active(self) -> bool:
        """Whether the loss is scaled."""
        return self.growth != 1.0

    def update(self, overflowed: bool) -> None:
        """Take the verdict on a step.

        Raises:
            FloatingPointError: gradients overflow although the loss is hardly scaled; the training diverged.
        """
        if not overflowed:
            self.succeeded += 1
            if self.succeeded % self.every == 0:
                self.scale *= self.growth
            return
        self.succeeded = 0
        self.scale *= self.shrink
        if self.scale < 2.0**-14:
            raise FloatingPointError(
                f"gradients still overflow with the loss scaled by {self.scale:.1e}: a parameter or a "
                f"batch is not "
                "finite, or the training diverged"
            )
