"""Key-value stores that bring ranks together.

Four of them:

    HashStore     threads of one process             PrefixStore   a room of its own in another store
    FileStore     processes that share a file        TCPStore      client of a `StoreServer`, anywhere
"""

from __future__ import annotations

from unisono.store.base import Store
from unisono.store.file import FileStore
from unisono.store.hash import HashStore
from unisono.store.prefix import PrefixStore
from unisono.store.tcp_client import NotOurServer, TCPStore
from unisono.store.tcp_server import StoreServer

__all__ = ["FileStore", "HashStore", "NotOurServer", "PrefixStore", "Store", "StoreServer", "TCPStore"]
