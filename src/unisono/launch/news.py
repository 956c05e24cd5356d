"""What the supervisor tells the front, which tells the other nodes: one line of JSON each.

{"stopped": 15}             a signal ends the job
{"failed": "rank 2: ..."}   so does a failure
{"failure": ..., ...}       how it ended: the last line
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from unisono.launch.summary import Failure

if TYPE_CHECKING:
    from unisono.launch.nodes import Nodes

__all__ = ["News", "tell"]


def tell(fd: int, record: Mapping[str, object]) -> None:
    """Write one line, the whole of it: a signal ends the write of a long one half way.

    Raises:
        OSError: nobody reads any more.
    """
    rest = memoryview(json.dumps(record).encode() + b"\n")
    while rest:
        rest = rest[os.write(fd, rest) :]


class News:
    """Reads, in a thread, what the supervisor says, and passes on what the other nodes must know at once."""

    def __init__(self, news: IO[str], nodes: Nodes) -> None:
        self.failure: Failure | None = None
        self.stopped = 0
        self.report = self.follow = ""
        self.said = False
        self._news = news
        self._nodes = nodes
        self.thread = threading.Thread(target=self._read, name="unisono-news", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for line in self._news:
            try:
                found = json.loads(line)
            except ValueError:
                self._on_fragment(line)
            else:
                self._on_record(found)

    def _on_record(self, found: Mapping[str, Any]) -> None:
        self.said = True
        if "stopped" in found:
            self.stopped = 128 + int(found["stopped"])
            self._nodes.announce(signal.Signals(found["stopped"]).name, self.stopped)
        elif "failed" in found:
            self._nodes.announce(found["failed"], 1)
        else:
            self.failure = Failure(*found["failure"]) if found["failure"] else None
            self.report, self.follow = found["report"], found["follow"]

    def _on_fragment(self, line: str) -> None:
        """It was killed while it wrote: that is no success, whatever it was about to say."""
        how = f"the launcher's word breaks off after {len(line)} characters"
        self.failure = Failure(-1, how, 1, False, time.time(), [])
        self.report = f"unisono run: {how}; how the ranks of this node ended is not known"
        self._nodes.announce(how, 1)
