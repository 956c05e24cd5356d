"""Errors in a call of an elastic run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.parallel.failures import RunFailures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

__all__ = ["ElasticFailures"]


class ElasticFailures(RunFailures):
    """The calls of a run, whose outcome the loss of a rank does not decide.

    Args:
        world, groups: see `RunFailures`.
        lost: whether an error comes from the loss of a rank.
        tell: tells the other members why this rank leaves, before they find that it has aborted.
    """

    def __init__(
        self,
        world: dist.ProcessGroup,
        groups: Sequence[dist.ProcessGroup],
        lost: Callable[[BaseException], bool],
        tell: Callable[[BaseException], None],
    ) -> None:
        super().__init__(world, groups)
        self._lost, self._tell = lost, tell

    def resolve(self, error: Exception, *, together: bool) -> None:
        """Decide what the error of a call means, see `RunFailures`."""
        if not self._lost(error):
            super().resolve(error, together=together)

    def _abort(self, error: Exception) -> None:
        self._tell(error)
        super()._abort(error)
