"""Groups of ranks and their operations.

group.py        Group, init_process_group, connect
collectives.py  what every rank calls      messages.py  what two ranks call      objects.py  Python objects
calls.py        the one path: checked arguments -> plan -> engine
layout.py       argument checks            work.py  operations under way         faults.py  errors
"""

from __future__ import annotations

from unisono.group.group import Group, connect, init_process_group
from unisono.group.messages import ANY_TAG
from unisono.group.work import DoneWork, MessageWork, Work

__all__ = ["ANY_TAG", "DoneWork", "Group", "MessageWork", "Work", "connect", "init_process_group"]
