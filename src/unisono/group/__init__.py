"""Groups of ranks and their operations.

group.py        Group, init_process_group, connect
collectives.py  what every rank calls      messages.py  what two ranks call      objects.py  Python objects
calls.py        the one path: checked arguments -> plan -> engine
coalesced.py    many buffers in one call   layout.py  argument checks            canon.py  reproducible order
work.py         operations under way       faults.py  errors                     site.py  the caller's line
"""

from __future__ import annotations

from unisono.group.group import Group, connect, init_process_group
from unisono.group.messages import ANY_TAG, Recv, Send
from unisono.group.work import DoneWork, MessageWork, Work

__all__ = [
    "ANY_TAG",
    "DoneWork",
    "Group",
    "MessageWork",
    "Recv",
    "Send",
    "Work",
    "connect",
    "init_process_group",
]
