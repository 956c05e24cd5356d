"""What ranks tell each other beside tensors, over any process group; and what one rank does for all of them.

Control data travel in Unisono's own encoding (`control_encoding`), never pickled. In these calls an error of
one rank is an error on all ranks: none waits for another that does not come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.torch_internals.lone_rank import is_lone

from .control_encoding import RankOutcome, opened

__all__ = [
    "broadcast_data",
    "control_device",
    "gather_on_rank_0",
    "on_every_rank",
    "on_rank_0",
    "recv_data",
    "scatter_from_rank_0",
    "send_data",
]

T = TypeVar("T")

HEAD = 1024
"""Bytes of the first message: the length of the data, and what of them fits beside it."""

PULSE_S = 1.0
"""Seconds between messages to ranks that wait for rank 0."""


def on_rank_0(do: Callable[[], T], group: Any = None) -> T:
    """What rank 0 of the group makes, on all its ranks. All of them call this; rank 0 alone runs `do`.

    The others wait as long as rank 0 works, also beyond the timeout of the group. Without a process group
    this process is rank 0, and so is the one rank of a job whose others are not there.

    Raises:
        Exception: what `do` raised; on all ranks.
    """
    if not dist.is_initialized() or is_lone():
        return do()
    if dist.get_rank(group):
        while not (data := _broadcast(b"", group, 0)):
            pass  # rank 0 is at work
        return opened(data)  # type: ignore[no-any-return]
    with _Pulse(group):
        outcome = RankOutcome(do)
    _broadcast(outcome.data, group, 0)
    return outcome.result()  # type: ignore[no-any-return]


def on_every_rank(do: Callable[[], T], group: Any = None) -> list[T]:
    """What each rank of the group makes, in their order. All of them call this, and run `do`.

    Raises:
        Exception: what `do` raised on the first of the ranks on which it failed; on all ranks.
    Example: on_every_rank(lambda: value) gathers the values of all ranks.
    """
    outcome = RankOutcome(do)
    if not dist.is_initialized():
        return [outcome.result()]
    if is_lone():  # the others make the same
        return [outcome.result()] * dist.get_world_size(group)
    return outcome.among(_all_gather(outcome.data, group), dist.get_rank(group))


def gather_on_rank_0(do: Callable[[], T], group: Any = None) -> list[T]:
    """What each rank of the group makes, on rank 0; an empty list on the others. All of them call this.

    Raises:
        Exception: what `do` raised on the first of the ranks on which it failed; on all ranks.
    """
    outcome, ranks, found = RankOutcome(do), _ranks(group), []
    if dist.get_rank(group):
        _send(outcome.data, ranks[0], group)
    else:
        every = [outcome.data, *(_recv(rank, group) for rank in ranks[1:])]
    try:
        on_rank_0(lambda: found.extend(outcome.among(every, 0)), group)
    except Exception as error:
        raise error from outcome.error
    return found


def scatter_from_rank_0(do: Callable[[], list[T]], group: Any = None) -> T:
    """For each rank of the group its item of the list that rank 0 makes. All of them call this.

    Raises:
        Exception: what `do` raised; on all ranks.
    """
    ranks, found = _ranks(group), []

    def encode_each() -> None:  # before the first is sent: what cannot be sent is an error on all ranks
        for _, item in zip(ranks, do(), strict=True):
            found.append(RankOutcome(partial(_same, item)))
            found[-1].result()

    on_rank_0(encode_each, group)
    if dist.get_rank(group):
        return recv_data(ranks[0], group)  # type: ignore[no-any-return]
    for rank, outcome in zip(ranks[1:], found[1:], strict=True):
        _send(outcome.data, rank, group)
    return found[0].result()  # type: ignore[no-any-return]


def _same(item: T) -> T:
    return item


def broadcast_data(value: T, group: Any = None, src: int = 0) -> T:
    """The value of rank `src` of the group, on all its ranks."""
    if dist.get_rank(group) != src:
        return opened(_broadcast(b"", group, src))  # type: ignore[no-any-return]
    outcome = RankOutcome(lambda: value)
    _broadcast(outcome.data, group, src)
    return outcome.result()  # type: ignore[no-any-return]


def send_data(value: Any, dst: int, group: Any = None) -> None:
    """Send a value to rank `dst` of the job."""
    outcome = RankOutcome(lambda: value)
    _send(outcome.data, dst, group)
    outcome.result()


def recv_data(src: int, group: Any = None) -> Any:
    """What rank `src` of the job sends by `send_data`."""
    return opened(_recv(src, group))


class _Pulse:
    """Tells the other ranks of a group that rank 0 is at work, while it is."""

    def __init__(self, group: Any) -> None:
        self._group, self._device, self._done = group, control_device(group), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="unisono-pulse", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _beat(self) -> None:
        try:
            while not self._done.wait(PULSE_S):
                _broadcast(b"", self._group, 0, self._device)
        except (RuntimeError, ValueError):
            pass  # the group has failed, or ended: so the next call of rank 0 says


def _ranks(group: Any) -> list[int]:
    """The ranks of the group in the job, those that `dist.send` takes."""
    return dist.get_process_group_ranks(group)


def _send(data: bytes, dst: int, group: Any) -> None:
    for message in _messages(data, control_device(group)):
        dist.send(message, dst, group=group)


def _recv(src: int, group: Any) -> bytes:
    head = torch.empty(HEAD, dtype=torch.uint8, device=control_device(group))
    dist.recv(head, src, group=group)
    rest = head.new_empty(_left(head))
    if rest.numel():
        dist.recv(rest, src, group=group)
    return _joined(head, rest)


def _broadcast(data: bytes, group: Any, src: int, device: torch.device | None = None) -> bytes:
    head, *more = _messages(data, device or control_device(group))
    dist.broadcast(head, group=group, group_src=src)
    rest = more[0] if more else head.new_empty(_left(head))
    if rest.numel():
        dist.broadcast(rest, group=group, group_src=src)
    return _joined(head, rest)


def _all_gather(data: bytes, group: Any) -> list[bytes]:
    head, *more = _messages(data, control_device(group))
    heads = [torch.empty_like(head) for _ in range(dist.get_world_size(group))]
    dist.all_gather(heads, head, group=group)
    longest = max(map(_left, heads))
    rests = [head.new_empty(longest) for _ in heads]
    if longest:
        mine = head.new_zeros(longest)
        for rest in more:
            mine[: len(rest)] = rest
        dist.all_gather(rests, mine, group=group)
    return [_joined(*both) for both in zip(heads, rests, strict=True)]


def control_device(group: Any) -> torch.device:
    """Where tensors of the group may lie: in the host's memory, if that is possible."""
    kinds = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _messages(data: bytes, device: torch.device) -> list[Tensor]:
    """The first message, and what does not fit into it."""
    whole = len(data).to_bytes(8, "little") + data
    parts = [whole[:HEAD].ljust(HEAD, b"\0"), whole[HEAD:]]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in parts if part]


def _length(head: Tensor) -> int:
    return int.from_bytes(bytes(head[:8].tolist()), "little")


def _left(head: Tensor) -> int:
    """Bytes that come after the first message."""
    return max(0, _length(head) - (HEAD - 8))


def _joined(head: Tensor, rest: Tensor) -> bytes:
    return (head[8:].cpu().numpy().tobytes() + rest.cpu().numpy().tobytes())[: _length(head)]
