"""What messages and calls cost a rank."""

from __future__ import annotations

import msgspec

__all__ = ["ByteCosts", "Costs", "InsideCosts"]


class InsideCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a message between two ranks of a host costs them, where they share memory.

    A sender writes its bytes once for all receivers of the host, and a reduction reads them where they are.

    Attributes:
        send_s, recv_s: the rank is busy for so long per message.
        write_s_per_byte: the sender is busy for so long per byte that it writes.
        s_per_byte: the receiver, per byte that it copies to its own buffer.
        in_place_bytes: messages from this size on are sent in place, where the engine does so: the sender
            writes nothing, and its receivers copy from its memory. A rank that receives, too, does so from
            twice this size on. 0: none is.
        in_place_s_per_byte: the receiver of such a message, per byte; 0: as `s_per_byte`. Its sender takes
            half of the bytes as soon as it waits for nothing else.
    """

    send_s: float = 0.0
    recv_s: float = 0.0
    write_s_per_byte: float = 0.0
    s_per_byte: float = 0.0
    in_place_bytes: int = 0
    in_place_s_per_byte: float = 0.0


class ByteCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a byte costs in buffers larger than `beyond_bytes`, which are in another cache, or in none.

    Parameters that depend on the size: P-LogP (Kielmann, Bal, Verstoep, IPDPS workshops 2000).

    Attributes:
        beyond_bytes: the size; smaller buffers have the costs of `Costs`.
        send: `Costs.o_s_per_byte`.  reduce, copy: as there.  write, read: `InsideCosts.write_s_per_byte` and
            `s_per_byte`.  in_place: `in_place_s_per_byte`.  Seconds per byte; None: as for smaller buffers.
    """

    beyond_bytes: int
    send: float | None = None
    reduce: float | None = None
    copy: float | None = None
    write: float | None = None
    read: float | None = None
    in_place: float | None = None


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What a message costs its ranks: LogGOPS, where L and G are those of the links.

    Attributes:
        o_send_s, o_recv_s: the rank is busy for so long per message, when it sends and when it receives (o).
        o_s_per_byte: and for so long per byte (O).
        g_s: between two messages that a rank begins to send, at least (g).
        rendezvous_bytes: from this size on, a message waits until its receiver asks for it (S); 0: never.
        reduce_s_per_byte: of combining one more contribution of a byte.
        copy_s_per_byte: of `Copy`; where messages within a host have costs of their own, also of a reduction
            whose result goes to another buffer than the rank's own contribution, beside `reduce_s_per_byte`.
        inside: of messages within a host; None: as those between hosts.
        call_s: of a call, before its first step.
        wake_s: of a rank that had to wait for a message, before it takes it: its core ran another one.
        larger: what bytes of larger buffers cost.
    """

    o_send_s: float = 0.0
    o_recv_s: float = 0.0
    o_s_per_byte: float = 0.0
    g_s: float = 0.0
    rendezvous_bytes: int = 0
    reduce_s_per_byte: float = 0.0
    copy_s_per_byte: float = 0.0
    inside: InsideCosts | None = None
    call_s: float = 0.0
    wake_s: float = 0.0
    larger: tuple[ByteCosts, ...] = ()

    def of_buffer(self, nbytes: float) -> Costs:
        """The costs with a buffer of this size."""
        found = self
        for size in sorted(self.larger, key=lambda size: size.beyond_bytes):
            if nbytes > size.beyond_bytes:
                found = _changed(found, size)
        return found


def _changed(costs: Costs, size: ByteCosts) -> Costs:
    inside = costs.inside and msgspec.structs.replace(
        costs.inside,
        **_given(write_s_per_byte=size.write, s_per_byte=size.read, in_place_s_per_byte=size.in_place),
    )
    given = _given(o_s_per_byte=size.send, reduce_s_per_byte=size.reduce, copy_s_per_byte=size.copy)
    return msgspec.structs.replace(costs, inside=inside, **given)


def _given(**values: float | None) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}
