"""The arguments of `@pytest.mark.ranks`, checked before a rank starts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.errors import message

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

MOST_RANKS = 1024
BACKENDS = ("unisono", "gloo", "nccl")
_LISTS = ("ranks", "hosts", "backend")
_FIXTURES = re.compile(r"""getfixture\(\s*["'](group|rank|process_group)["']""")


class Settings(NamedTuple):
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


def lists(mark: pytest.Mark) -> Iterator[tuple[str, list[Any]]]:
    """The arguments with several values."""
    for name, value in _arguments(mark).items():
        if name in _LISTS and isinstance(value, (list, tuple)):
            yield name, list(value)


def settings(item: pytest.Item) -> Settings:
    """Read the marker of a test.

    Raises:
        TypeError: an argument is missing, unknown, or of a wrong type.
        ValueError: an argument is out of range.
    """
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    chosen = getattr(getattr(item, "callspec", None), "params", {})
    given = _arguments(mark)
    for name in _LISTS:
        if isinstance(given.get(name), (list, tuple)):
            if name not in chosen:
                raise TypeError(f"ranks: {name} is a list, which only a test function can have")
            given[name] = chosen[name]
    unknown = given.keys() - Settings._fields
    if unknown or "ranks" not in given:
        what = f"there is no {min(unknown)}=" if unknown else "the number of ranks is missing"
        raise TypeError(message(f"ranks: {what}", expected=f"ranks(n, {', '.join(Settings._fields[1:])})"))
    return _checked(Settings(**given))


def asks_for_ranks(doctest: Any) -> bool:
    """Whether a doctest uses one of the fixtures."""
    return any(_FIXTURES.search(example.source) for example in doctest.dtest.examples)


def _arguments(mark: pytest.Mark) -> dict[str, Any]:
    if len(mark.args) > 1:
        raise TypeError(f"ranks takes one positional argument, the number of ranks, not {len(mark.args)}")
    return {**({"ranks": mark.args[0]} if mark.args else {}), **mark.kwargs}


def _checked(given: Settings) -> Settings:
    for name, least, most in (("ranks", 1, MOST_RANKS), ("hosts", 1, given.ranks), ("virtual_gpus", 0, 64)):
        value = getattr(given, name)
        if type(value) is not int:
            raise TypeError(message(f"ranks: {name}", observed=repr(value), expected="an integer"))
        if not least <= value <= most:
            raise ValueError(message(f"ranks: {name}", observed=str(value), expected=f"{least} to {most}"))
    if given.ranks % given.hosts:
        raise ValueError(f"ranks: {given.ranks} ranks cannot be on {given.hosts} hosts with as many on each")
    if given.backend not in BACKENDS:
        raise ValueError(
            message("ranks: backend", observed=repr(given.backend), expected=", ".join(BACKENDS))
        )
    limit = given.timeout
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit <= 0):
        raise ValueError(message("ranks: timeout", observed=repr(limit), expected="seconds, more than 0"))
    return given
