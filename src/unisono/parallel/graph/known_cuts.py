"""Cuts of the tensor axis, each of which is found once, or its error."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from .cut import Cut
from .shapes import CaptureError

__all__ = ["KnownCuts"]


class KnownCuts:
    """What has been found for one model."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Cut | CaptureError] = {}

    def of(self, key: Hashable, find: Callable[[], Cut]) -> Cut:
        """The cut of this key.

        Raises:
            CaptureError: it cannot be cut. It is not tried again.
        """
        if key not in self._known:
            try:
                self._known[key] = find()
            except CaptureError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, CaptureError):
            raise found
        return found
