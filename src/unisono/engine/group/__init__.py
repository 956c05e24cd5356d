"""Groups of ranks and their operations.

group.py      Group: every operation, abstract         init.py      init_process_group
planning.py   Planner: what all check before a call    signature.py what makes a method of Group a collective
layout.py     a call's buffers, and their checks       arguments.py its other arguments, and their checks
coalesced.py  many buffers in one call                 results.py   allocated results
messages.py   between two ranks: checks                objects.py   Python objects
work.py       operations under way                     waiting.py   wait for several works

The engine's groups:
native.py           NativeGroup, connect               native_planning.py   choose, lower and bind a call
native_messages.py  messages under way                 canon.py             reproducible order
custom.py           algorithms of the caller           parent.py            while a subgroup is made
membership.py       a group that has a next one         departure.py        a rank that is lost
shrink.py           agree on the next group, make it    admission.py        newcomers, seen by the members
succession.py       from a group to the next one        joining.py          newcomers, seen by themselves
listening.py        where newcomers come to            turns.py            a program whose group changes

Groups over another library:
external.py         ExternalGroup                      external_planning.py what a library refuses; its calls
external_work.py    operations under way               external_init.py     init_process_group
"""

from __future__ import annotations

from unisono._native import Status
from unisono.engine.group.departure import Departure
from unisono.engine.group.group import Group
from unisono.engine.group.init import init_process_group
from unisono.engine.group.messages import ANY_TAG, RecvFrom, SendTo
from unisono.engine.group.native import connect
from unisono.engine.group.waiting import wait_all, wait_any
from unisono.engine.group.work import DoneWork, MessageWork, Work

__all__ = [
    "ANY_TAG",
    "Departure",
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
