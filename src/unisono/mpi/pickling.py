"""`pickle`: how lowercase calls encode objects. A receiver runs code that the sender chose."""

from __future__ import annotations

import pickle as _pickle  # noqa: TID251 - lowercase calls promise to send whatever pickles
from collections.abc import Callable, Mapping
from typing import Any

from unisono.mpi.byte_memory import buffer


class Pickle:
    """The functions `dumps` and `loads`; a program may replace them: `pickle.__init__(dumps, loads)`."""

    def __init__(
        self,
        dumps: Callable[..., Any] | None = None,
        loads: Callable[..., Any] | None = None,
        protocol: int | None = None,
        threshold: int | None = None,
    ) -> None:
        self._dumps, self._loads = dumps or _pickle.dumps, loads or _pickle.loads
        self.PROTOCOL = _pickle.HIGHEST_PROTOCOL if protocol is None and dumps is None else protocol
        self.THRESHOLD = 1024**2 // 4 if threshold is None else threshold

    def read(self, environ: Mapping[str, str]) -> None:
        """Take MPI4PY_PICKLE_PROTOCOL and MPI4PY_PICKLE_THRESHOLD, as mpi4py does when MPI is imported."""
        for name in ("PROTOCOL", "THRESHOLD"):
            text = environ.get(f"MPI4PY_PICKLE_{name}", "")
            if text.strip().isdecimal():
                setattr(self, name, int(text))

    def dumps(self, obj: Any) -> Any:
        """The bytes of an object."""
        return self._dumps(obj) if self.PROTOCOL is None else self._dumps(obj, self.PROTOCOL)

    def loads(self, data: Any) -> Any:
        """The object of bytes; of none: None."""
        return self._loads(data) if len(data) else None

    def dumps_oob(self, obj: Any) -> tuple[Any, list[Any]]:
        """(the bytes of an object, its large buffers)."""
        buffers: list[Any] = []

        def keep(found: Any) -> bool:
            raw = found.raw()
            if raw.nbytes < self.THRESHOLD:
                return True
            buffers.append(buffer(raw))
            return False

        protocol = max(self.PROTOCOL or 0, 5)
        return self._dumps(obj, protocol, buffer_callback=keep), buffers

    def loads_oob(self, data: Any, buffers: Any) -> Any:
        """The object of bytes and buffers."""
        return self._loads(data, buffers=buffers)


pickle = Pickle()
