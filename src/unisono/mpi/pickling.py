"""`pickle`: how lowercase calls encode objects. A receiver runs code that the sender chose."""

from __future__ import annotations

import pickle as _pickle  # noqa: TID251 - lowercase calls promise to send whatever pickles
from collections.abc import Callable, Mapping
from typing import Any

from unisono.mpi.byte_memory import buffer


class Pickle:
    """The functions `dumps` and `loads`; a program may replace them: `pickle.__init__(dumps, loads)`.

    encode, decode: the same for this package, with fewer calls; `decode` gets what `encode` gives.
    """

    def __init__(
        self, dumps: Callable[..., Any] | None = None, loads: Callable[..., Any] | None = None,
        protocol: int | None = None, threshold: int | None = None,
    ) -> None:  # fmt: skip
        self._dumps, self._loads = dumps or _pickle.dumps, loads or _pickle.loads
        self.decode = self._loads if loads is None else self.loads
        self._default = _pickle.HIGHEST_PROTOCOL if dumps is None else None
        self._set_protocol(protocol)
        self._set_threshold(threshold)

    def _set_protocol(self, protocol: int | None) -> None:
        self._protocol = self._default if protocol is None else protocol
        dumps, chosen = self._dumps, self._protocol
        self.encode: Callable[[Any], Any] = dumps if chosen is None else lambda obj: dumps(obj, chosen)

    def _set_threshold(self, threshold: int | None) -> None:
        self._threshold = 1024**2 // 4 if threshold is None else threshold

    PROTOCOL = property(lambda self: self._protocol, _set_protocol, doc="Of pickles. None: the default.")
    THRESHOLD = property(
        lambda self: self._threshold,
        _set_threshold,
        doc="The bytes from which on a buffer is sent beside its pickle. None: the default.",
    )

    def read(self, environ: Mapping[str, str]) -> None:
        """Take MPI4PY_PICKLE_PROTOCOL and MPI4PY_PICKLE_THRESHOLD, as mpi4py does when MPI is imported."""
        for name in ("PROTOCOL", "THRESHOLD"):
            text = environ.get(f"MPI4PY_PICKLE_{name}", "")
            if text.strip().isdecimal():
                setattr(self, name, int(text))

    def dumps(self, obj: Any) -> Any:
        """The bytes of an object."""
        return self.encode(obj)

    def loads(self, data: Any) -> Any:
        """The object of bytes; of none: None."""
        return self._loads(data) if len(data) else None

    def dumps_oob(self, obj: Any) -> tuple[Any, list[Any]]:
        """(the bytes of an object, its large buffers)."""
        buffers: list[Any] = []

        def keep(found: Any) -> bool:
            raw = found.raw()
            if raw.nbytes < self._threshold:
                return True
            buffers.append(buffer(raw))
            return False

        protocol = max(self._protocol or 0, 5)
        return self._dumps(obj, protocol, buffer_callback=keep), buffers

    def loads_oob(self, data: Any, buffers: Any) -> Any:
        """The object of bytes and buffers."""
        return self._loads(data, buffers=buffers)


pickle = Pickle()
