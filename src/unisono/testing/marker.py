"""The arguments of `@pytest.mark.ranks`, checked before a rank starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.engine.base.validation import positive, whole
from unisono.errors import message

if TYPE_CHECKING:
    import pytest

MOST_RANKS = 1024
BACKENDS = ("unisono", "gloo", "nccl")
LISTS = ("ranks", "hosts", "backend")


class RanksMarker(NamedTuple):
    """On what a test runs.

    Attributes:
        ranks: their number.
        hosts: how many hosts they act as if they were on: ranks of different ones use sockets.
        virtual_gpus: of this machine, for all ranks together; 0: those of `--virtual-gpus`, or none.
        backend: of the fixtures `group` and `process_group`.
        timeout: seconds for the whole test, its fixtures included; None: pytest-timeout's limit, or 300 s.
    """

    ranks: int
    hosts: int = 1
    virtual_gpus: int = 0
    backend: str = "unisono"
    timeout: float | None = None


def arguments(mark: pytest.Mark) -> dict[str, Any]:
    """The arguments by name."""
    return {**dict(zip(["ranks"], mark.args, strict=False)), **mark.kwargs}


def settings(item: pytest.Item) -> RanksMarker:
    """Read the marker of a test.

    Raises:
        TypeError: an argument is missing, unknown, or of a wrong type.  ValueError: it is out of range.
    """
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    given = arguments(mark)
    for name in LISTS:
        if isinstance(given.get(name), (list, tuple)):
            if not given[name]:
                raise ValueError(f"ranks: the list of {name} is empty")
            given[name] = getattr(item, "callspec").params[name]  # noqa: B009  (of functions only)
    if unknown := given.keys() - RanksMarker._fields:
        what = f"ranks: there is no {min(unknown)}="
        raise TypeError(message(what, expected=f"ranks(n, {', '.join(RanksMarker._fields[1:])})"))
    if "ranks" not in given or len(mark.args) > 1:
        raise TypeError("ranks(n) needs one number, of ranks")
    chosen = RanksMarker(**given)
    chosen = chosen._replace(
        ranks=whole(chosen.ranks, "ranks", 1, MOST_RANKS),
        hosts=whole(chosen.hosts, "hosts", 1, chosen.ranks),
        virtual_gpus=whole(chosen.virtual_gpus, "virtual_gpus", 0, 64),
    )
    if chosen.ranks % chosen.hosts:
        raise ValueError(f"ranks: {chosen.ranks} ranks are no multiple of {chosen.hosts} hosts")
    if chosen.backend not in BACKENDS:
        expected = ", ".join(BACKENDS)
        raise ValueError(message("ranks: backend", observed=repr(chosen.backend), expected=expected))
    if chosen.timeout is not None:
        positive(chosen.timeout, "timeout")
    return chosen
