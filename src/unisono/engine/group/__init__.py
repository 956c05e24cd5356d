"""Groups of ranks and their operations.

group.py      Group: every operation, the way to subgroups, the end      init.py     init_process_group
signature.py  what makes a method of Group a collective                  custom.py   algorithms of the caller
planning.py   a new call: checked -> plan -> lowered -> bound            layout.py   argument checks
coalesced.py  many buffers in one call   messages.py  between two ranks  objects.py  Python objects
results.py    allocated results          canon.py     reproducible order work.py     operations under way
waiting.py    wait for several works         external.py  a group over another library: checks, refusals
external_work.py  its operations under way   outside.py   init_process_group for such groups
"""

from __future__ import annotations

from unisono._native import Status
from unisono.engine.group.group import Group, connect
from unisono.engine.group.init import init_process_group
from unisono.engine.group.messages import ANY_TAG, RecvFrom, SendTo
from unisono.engine.group.waiting import wait_all, wait_any
from unisono.engine.group.work import DoneWork, MessageWork, Work

__all__ = [
    "ANY_TAG",
    "DoneWork",
    "Group",
    "MessageWork",
    "RecvFrom",
    "SendTo",
    "Status",
    "Work",
    "connect",
    "init_process_group",
    "wait_all",
    "wait_any",
]
