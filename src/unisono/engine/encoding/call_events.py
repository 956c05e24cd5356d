"""What a rank has called, as it is kept in a file; `engine/group/recording.py` notes it."""

from __future__ import annotations

import msgspec

__all__ = ["CallEvent", "RankRecording", "read_part"]


class CallEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of this rank.

    Attributes:
        name: of the method; "wait" for the end of an asynchronous call.
        begin_ns, end_ns: by a clock of this process.  cpu_begin_ns, cpu_end_ns: its processor time then.
        group: the name of its group, and the members by their rank in the world.
        nbytes: of the whole buffer, the larger one of input and output.
        algorithm: that the caller asked for.  root: in the group.
        handle: the number of an asynchronous call; 0: it was waited for at once.
        peer: in the world, of a message.  waits: the handle that "wait" waits for.
    """

    name: str
    begin_ns: int
    end_ns: int
    cpu_begin_ns: int
    cpu_end_ns: int
    group: tuple[str, tuple[int, ...]] = ("", ())
    nbytes: int = 0
    algorithm: str = ""
    root: int = 0
    handle: int = 0
    peer: int = -1
    waits: int = 0


class RankRecording(msgspec.Struct, frozen=True):
    """All calls of a rank."""

    rank: int
    size: int
    events: list[CallEvent]


_decode = msgspec.msgpack.Decoder(RankRecording).decode


def read_part(data: bytes) -> RankRecording:
    """What a rank has written.

    Raises:
        ValueError: it is something else.
    """
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
