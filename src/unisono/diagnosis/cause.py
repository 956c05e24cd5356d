"""The text of why a rank leaves its group, for the other ranks. Sends nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import WrapperDescriptorType

__all__ = ["at_failure", "reason", "uncaught", "why"]

MOST_BYTES = 200
"""The longest text of an exception; a remark holds more."""

MOST_CHARACTERS = 1 << 16
"""Longer arguments of an exception are not looked through."""

MOST_BITS = 256
"""Of a number that is put into digits."""


def why(error: BaseException | None) -> str:
    """The type and the first line of the exception that makes this rank leave; "" when it leaves of itself.

    Takes no time worth speaking of, and never raises: neither a tensor is waited for nor a list formatted.

    Example: ValueError("bad loss") -> "ValueError: bad loss"; ValueError([1, 2]) -> "ValueError"
    """
    if error is None or isinstance(error, GeneratorExit):
        return ""
    if isinstance(error, SystemExit) and _is_plain(error.code):
        if not error.code:
            return ""
        if type(error.code) is int:  # as multiprocessing's ways of reporting an error end a process
            error = error.__context__ or error
    first_line = ""
    with contextlib.suppress(Exception):  # attributes of a class of the caller's
        first_line = _text(error).strip().partition("\n")[0]
    text = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MOST_BYTES:
        return encoded.decode()
    return encoded[:MOST_BYTES].decode("utf-8", "ignore") + "..."


def reason() -> BaseException | None:
    """Why this rank leaves now: the exception being handled, or the one that has ended the program."""
    return sys.exc_info()[1] or uncaught()


def at_failure(owner: object, leave: Callable[[], object]) -> None:
    """Let `leave` run when an exception ends a child of `multiprocessing`, while that is being handled.

    A spawned child has forgotten it at the interpreter's exit, and a forked one never comes there.
    """
    process, util = map(sys.modules.get, ("multiprocessing.process", "multiprocessing.util"))
    if process is not None and util is not None and process.parent_process() is not None:
        util.Finalize(owner, partial(_at_failure, leave), exitpriority=0)


def _at_failure(leave: Callable[[], object]) -> None:
    if why(reason()):
        leave()


def uncaught() -> BaseException | None:
    """What has ended the program; None before its end, for then it was caught somewhere."""
    if threading.main_thread().is_alive() or hasattr(sys, "ps1"):  # an interactive one went on after it
        return None
    error: BaseException | None = getattr(sys, "last_value", None)
    return error


def _text(error: BaseException) -> str:
    """What the exception says, where it takes no code but the interpreter's own to say it."""
    if not all(_is_plain(arg) for arg in error.args):
        return ""
    if isinstance(type(error).__str__, WrapperDescriptorType):
        return str(error)
    return BaseException.__str__(error)  # its own __str__ may take any time: its arguments, then


def _is_plain(value: object) -> bool:
    """Whether a value has a quick text. A subclass may define its own."""
    if type(value) in (str, bytes):
        return len(value) <= MOST_CHARACTERS  # type: ignore[arg-type]
    if type(value) is int:
        return value.bit_length() <= MOST_BITS
    return value is None or type(value) in (bool, float)
