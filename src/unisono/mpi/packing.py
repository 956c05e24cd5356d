"""Packing items into bytes and back: in this machine's form, and in the portable one ("external32")."""

from __future__ import annotations

from typing import Any

from unisono.mpi import constants
from unisono.mpi.buffers import bytes_of
from unisono.mpi.errors import Exception, whole


class Packing:
    """The methods of `Datatype` that pack."""

    _alive: Any

    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: Any) -> int:  # noqa: ARG002
        """Pack items behind `position`; returns the new position."""
        return self._pack(inbuf, outbuf, position, swap=False)

    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: Any) -> int:  # noqa: ARG002
        """Unpack items from `position` on; returns the new position."""
        return self._unpack(inbuf, position, outbuf, swap=False)

    def Pack_size(self, count: int, comm: Any) -> int:  # noqa: ARG002
        """The bytes that `count` items need."""
        return whole(count, "count") * int(self._alive().size)

    def Pack_external(self, datarep: str, inbuf: Any, outbuf: Any, position: int) -> int:
        """See `Pack`. datarep: "external32": numbers have their highest byte first."""
        _check(datarep)
        return self._pack(inbuf, outbuf, position, swap=True)

    def Unpack_external(self, datarep: str, inbuf: Any, position: int, outbuf: Any) -> int:
        """See `Unpack`."""
        _check(datarep)
        return self._unpack(inbuf, position, outbuf, swap=True)

    def Pack_external_size(self, datarep: str, count: int) -> int:
        """See `Pack_size`."""
        _check(datarep)
        return whole(count, "count") * int(self._alive().size)

    def _pack(self, inbuf: Any, outbuf: Any, position: int, *, swap: bool) -> int:
        state, raw, room = self._alive(), bytes_of(inbuf)[0], bytes_of(outbuf, writable=True)[0]
        packed = state.layout.pack(raw, 0, raw.size // state.extent if state.extent else 0)
        if position + packed.size > room.size:
            raise Exception(constants.ERR_TRUNCATE, f"{packed.size} bytes at {position} of {room.size}")
        room[position : position + packed.size] = state.swapped(packed) if swap else packed
        return position + packed.size

    def _unpack(self, inbuf: Any, position: int, outbuf: Any, *, swap: bool) -> int:
        state, raw, room = self._alive(), bytes_of(inbuf)[0], bytes_of(outbuf, writable=True)[0]
        end = position + (room.size // state.extent if state.extent else 0) * state.size
        if end > raw.size:
            raise Exception(constants.ERR_TRUNCATE, f"{end - position} bytes at {position} of {raw.size}")
        packed = raw[position:end]
        state.layout.unpack(state.swapped(packed) if swap else packed, room, 0)
        return end


def _check(datarep: str) -> None:
    if datarep != "external32":
        raise Exception(constants.ERR_ARG, f"there is no data representation {datarep!r}")
