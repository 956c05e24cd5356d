"""What messages and calls cost a rank."""

from __future__ import annotations

import msgspec

__all__ = ["Costs", "InsideCosts"]


class InsideCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a message between two ranks of a host costs them, where they share memory.

    A sender writes its bytes once for all receivers of the host, and a reduction reads them where they are.

    Attributes:
        send_s, recv_s: the rank is busy for so long per message.
        write_s_per_byte: the sender is busy for so long per byte that it writes.
        s_per_byte: the receiver, per byte that it copies to its own buffer.
        in_place_bytes: a message from this size on is not written: its receivers copy it from the sender's
            memory, also before they reduce it; 0: none.
    """

    send_s: float = 0.0
    recv_s: float = 0.0
    write_s_per_byte: float = 0.0
    s_per_byte: float = 0.0
    in_place_bytes: int = 0


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What a message costs its ranks: LogGOPS, where L and G are those of the links.

    Attributes:
        o_send_s, o_recv_s: the rank is busy for so long per message, when it sends and when it receives (o).
        o_s_per_byte: and for so long per byte (O).
        g_s: between two messages that a rank begins to send, at least (g).
        rendezvous_bytes: from this size on, a message waits until its receiver asks for it (S); 0: never.
        reduce_s_per_byte: of combining one more contribution of a byte.  copy_s_per_byte: of `Copy`.
        inside: of messages within a host; None: as those between hosts.
        call_s: of a call, before its first step.
        cache_bytes: a larger buffer is not in a cache; 0: there is no difference.
        beyond_cache: the factor of all times per byte of such a buffer.
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
    cache_bytes: int = 0
    beyond_cache: float = 1.0

    def of_buffer(self, nbytes: float) -> Costs:
        """The costs with a buffer of this size: times per byte are larger where it is in no cache."""
        if not self.cache_bytes or nbytes <= self.cache_bytes or self.beyond_cache == 1.0:
            return self
        inside = self.inside and msgspec.structs.replace(
            self.inside,
            write_s_per_byte=self.inside.write_s_per_byte * self.beyond_cache,
            s_per_byte=self.inside.s_per_byte * self.beyond_cache,
        )
        return msgspec.structs.replace(
            self,
            o_s_per_byte=self.o_s_per_byte * self.beyond_cache,
            reduce_s_per_byte=self.reduce_s_per_byte * self.beyond_cache,
            copy_s_per_byte=self.copy_s_per_byte * self.beyond_cache,
            inside=inside,
            cache_bytes=0,
        )
