"""Groups of ranks and their operations.

group.py                Group: every operation, abstract
init.py                 init_process_group
signature.py            what makes a method of Group a collective
planning.py             Planner: what every group checks before a call
buffer_layout.py        the buffers of a call, and their checks
arguments.py            its other arguments, and their checks
coalescing.py           many buffers in one call
call_results.py         the result that a call allocates
messages.py             messages between two ranks: checks
objects.py              Python objects
work.py                 operations under way
completion.py           wait for several works

The engine's groups:
native.py               NativeGroup, connect
native_planning.py      choose, lower and bind a call
message_planning.py     the works of messages
reproducibility.py      algorithms with the canonical order
custom_algorithms.py    algorithms of the caller
parent_group.py         the parent while a subgroup is made
codec_arguments.py      the codec of a call
codec_planning.py       proof, error bound, choice
codec_messages.py       messages with encoded values
error_bound.py          the error of a plan
membership.py           a group that has a next one
departure.py            a rank that is lost
shrink.py               agree on the next group, make it
admission.py            newcomers, seen by the members
joining.py              newcomers, seen by themselves
listening.py            where newcomers come to
succession.py           from a group to the next one
elastic_loop.py         a program whose group changes

Groups over another library:
external.py             ExternalGroup
external_planning.py    what a library refuses; its calls
external_work.py        operations under way
external_init.py        init_process_group
"""

from __future__ import annotations

from unisono._native import Status
from unisono.engine.group.completion import wait_all, wait_any
from unisono.engine.group.departure import Departure
from unisono.engine.group.group import Group
from unisono.engine.group.init import init_process_group
from unisono.engine.group.messages import ANY_TAG, RecvFrom, SendTo
from unisono.engine.group.native import connect
from unisono.engine.group.work import CompletedWork, MessageWork, Work

__all__ = [
    "ANY_TAG",
    "CompletedWork",
    "Departure",
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
