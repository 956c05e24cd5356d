"""Futures made of futures."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from typing import Any

__all__ = ["collect", "compose"]


def collect(fs: Collection[Future[Any]]) -> Future[list[Any]]:
    """A future of the list of all results; the first exception, or cancellation, of one is that of all.

    If it is cancelled, all of `fs` are.
    """
    items = list(fs)
    whole: Future[list[Any]] = type(items[0])() if items else Future()
    if not items:
        whole.set_result([])
        return whole

    def note(done: Future[Any]) -> None:
        if done.cancelled():
            whole.cancel()
        elif done.exception() is not None:
            _settle(whole, error=done.exception())
        elif all(item.done() and not item.cancelled() and item.exception() is None for item in items):
            _settle(whole, [item.result() for item in items])

    whole.add_done_callback(lambda _: [item.cancel() for item in items])
    whole.add_done_callback(_notify_cancel)
    for item in set(items):
        item.add_done_callback(note)
    return whole


def compose(
    future: Future[Any],
    resulthook: Callable[[Any], Any] | None = None,
    excepthook: Callable[[BaseException], Any] | None = None,
) -> Future[Any]:
    """A future of what the hooks make of the result, or of the exception, of `future`.

    An exception that `excepthook` returns, and one that a hook raises, is that of the new future.
    """
    new: Future[Any] = type(future)()

    def settle(done: Future[Any]) -> None:
        if done.cancelled():
            new.cancel()
            return
        try:
            error = done.exception()
            hook: Callable[[Any], Any] | None = resulthook if error is None else excepthook
            value = done.result() if error is None else error
            value = value if hook is None else hook(value)
        except BaseException as failure:  # noqa: BLE001 (it is the new future's)
            _settle(new, error=failure)
            return
        if error is not None and isinstance(value, BaseException):
            _settle(new, error=value)
        else:
            _settle(new, value)

    new.add_done_callback(lambda done: done.cancelled() and future.cancel())
    new.add_done_callback(_notify_cancel)
    future.add_done_callback(settle)
    return new


def _notify_cancel(future: Future[Any]) -> None:
    if future.cancelled():
        future.set_running_or_notify_cancel()


def _settle(future: Future[Any], value: Any = None, *, error: BaseException | None = None) -> None:
    """Give a future its end, unless it has one."""
    try:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)
    except InvalidStateError:  # cancelled meanwhile
        return
