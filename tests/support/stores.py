"""Every kind of store, for suites that run over all of them."""

from pathlib import Path
from typing import Any

from effort import HANG_S
from unisono.engine.store import FileStore, HashStore, PrefixStore, Store, StoreServer, TCPStore

KINDS = ["hash", "file", "tcp", "tcp6", "tcp-token", "tcp-tls", "prefix-hash", "prefix-file", "prefix-tcp"]


class Place:
    """A place where clients open stores with the same keys."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._path = folder / "store"
        self._opened: list[Store] = []
        self._hash = HashStore(HANG_S)
        proven = kind in ("tcp-token", "tcp-tls")
        self._safe: dict[str, Any] = {"token": b"t" * 32 if proven else b"", "tls": kind == "tcp-tls"}
        host = "::1" if kind == "tcp6" else "127.0.0.1"
        self._server = StoreServer(host, **self._safe) if "tcp" in kind else None

    def open(self) -> Store:
        """Another client of the place's store."""
        if self._server is not None:
            store: Store = TCPStore(self._server.host, self._server.port, timeout_s=HANG_S, **self._safe)
        elif "file" in self.kind:
            store = FileStore(self._path, timeout_s=HANG_S)
        else:
            store = self._hash
        self._opened.append(store)
        return PrefixStore("room", store) if self.kind.startswith("prefix") else store

    def close(self) -> None:
        """Close everything opened here."""
        for store in self._opened:
            store.close()
        if self._server is not None:
            self._server.close()
