"""Key-value stores for the rendezvous of ranks.

Four of them:

    HashStore     threads of one process             PrefixStore   its own keys in another store
    FileStore     processes that share a file        TCPStore      client of a `StoreServer`, anywhere

Stores that most ranks do not need are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unisono.engine.store.base import Store
from unisono.engine.store.prefix import PrefixStore
from unisono.engine.store.tcp_client import NotOurServer, TCPStore

if TYPE_CHECKING:
    from unisono.engine.store.file import FileStore
    from unisono.engine.store.hash import HashStore
    from unisono.engine.store.tcp_server import StoreServer

__all__ = ["FileStore", "HashStore", "NotOurServer", "PrefixStore", "Store", "StoreServer", "TCPStore"]


_HOMES = {"FileStore": "file", "HashStore": "hash", "StoreServer": "tcp_server"}


if not TYPE_CHECKING:  # to a type checker a name that does not exist is an error

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'unisono.engine.store' has no attribute {name!r}")
        return getattr(import_module(f"unisono.engine.store.{_HOMES[name]}"), name)
