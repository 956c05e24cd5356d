"""The close reason: the text of why a rank leaves its group, for the other ranks. It sends nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import WrapperDescriptorType

MOST_BYTES = 200
"""The longest text of an exception; a report holds more."""

MOST_FAILURE_BYTES = 239
"""The longest text of a function's failure: what a report holds."""

MOST_CHARACTERS = 1 << 16
"""Longer arguments of an exception are not formatted."""

MOST_BITS = 256
"""The most bits of a number that is formatted."""


def close_reason(error: BaseException | None) -> str:
    """The type and the first line of the exception that makes this rank leave; "" if it leaves without one.

    It is fast and never raises: it does not wait for a tensor, and does not format a list.

    Example: ValueError("bad loss") -> "ValueError: bad loss"; ValueError([1, 2]) -> "ValueError"
    """
    if error is None or isinstance(error, GeneratorExit):
        return ""
    if isinstance(error, SystemExit) and _is_plain(error.code):
        if not error.code:
            return ""
        if type(error.code) is int:  # multiprocessing ends a failed process with one
            error = error.__context__ or error
    first_line = ""
    with contextlib.suppress(Exception):  # the caller's class may have such attributes
        first_line = _text(error).strip().partition("\n")[0]
    text = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MOST_BYTES:
        return encoded.decode()
    return encoded[:MOST_BYTES].decode("utf-8", "ignore") + "..."


def function_failure(error: BaseException) -> str:
    """The reason when a reduction function has raised: the exception, and the lines that led to it.

    Example: "ZeroDivisionError: division by zero, at train.py:12 in ratio < train.py:40 in merge"
    """
    frames = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if not frame.filename.endswith("/unisono/engine/operations/functions.py")
    ]
    text = close_reason(error) or type(error).__name__
    for number, frame in enumerate(frames):
        longer = f"{text}{', at ' if not number else ' < '}{frame}"
        if len(longer.encode("utf-8", "replace")) > MOST_FAILURE_BYTES:
            break
        text = longer
    return text.encode("utf-8", "replace").decode()


def error_reason() -> BaseException | None:
    """Why this rank leaves now: the exception being handled, or the one that has ended the program."""
    return sys.exc_info()[1] or uncaught_reason()


def reason_at_failure(owner: object, leave: Callable[[], object]) -> None:
    """Run `leave` when an exception ends a child of `multiprocessing`, while the exception is handled.

    At the interpreter's exit the exception of a spawned child is gone, and a forked child has no such exit.
    """
    process, util = map(sys.modules.get, ("multiprocessing.process", "multiprocessing.util"))
    if process is not None and util is not None and process.parent_process() is not None:
        util.Finalize(owner, partial(_at_failure, leave), exitpriority=0)


def _at_failure(leave: Callable[[], object]) -> None:
    if close_reason(error_reason()):
        leave()


def uncaught_reason() -> BaseException | None:
    """The exception that has ended the program; None before its end: then it was caught."""
    if threading.main_thread().is_alive() or hasattr(sys, "ps1"):  # an interactive program continues after it
        return None
    error: BaseException | None = getattr(sys, "last_value", None)
    return error


def _text(error: BaseException) -> str:
    """The text of the exception, if no code except the interpreter's has to run for it."""
    if not all(_is_plain(arg) for arg in error.args):
        return ""
    ours = type(error).__module__.startswith("unisono.")  # MPI.Exception: of a number, with a text
    if ours or isinstance(type(error).__str__, WrapperDescriptorType):
        return str(error)
    return BaseException.__str__(error)  # not its own __str__, which may take any time


def _is_plain(value: object) -> bool:
    """Whether a value can be formatted quickly; not a subclass, which may define its own text."""
    if type(value) in (str, bytes):
        return len(value) <= MOST_CHARACTERS  # type: ignore[arg-type]
    if type(value) is int:
        return value.bit_length() <= MOST_BITS
    return value is None or type(value) in (bool, float)
