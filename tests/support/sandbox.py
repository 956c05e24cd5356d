"""A sandbox around this process: seccomp refuses a system call."""

import ctypes
import os
import struct

import system

SYSCALLS = {
    "x86_64": {"read": 310, "write": 311, "adopt": 157},
    "aarch64": {"read": 270, "write": 271, "adopt": 167},
}
FIRST_ARGUMENT = {"adopt": 36}  # PR_SET_CHILD_SUBREAPER


def refuse(what: str) -> None:
    """Make the system refuse this process and its children something, as a sandbox does.

    what: "read" or "write", a copy from or to another process; or "adopt", orphans.
    """
    if system.why_not("orphans" if what == "adopt" else "other processes"):
        return  # it refuses that already
    load, jump, back = 0x20, 0x15, 0x06  # of a field; equal to; return
    asked = [(0, SYSCALLS[os.uname().machine][what])]
    asked += [(16, FIRST_ARGUMENT[what])] if what in FIRST_ARGUMENT else []
    program = b""
    for left, (field, value) in zip(range(len(asked), 0, -1), asked, strict=True):
        program += struct.pack("HBBI", load, 0, 0, field) + struct.pack("HBBI", jump, 0, 2 * left - 1, value)
    program += struct.pack("HBBI", back, 0, 0, 0x00050001) + struct.pack("HBBI", back, 0, 0, 0x7FFF0000)
    code = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((38, 1, 0, 0, 0), (22, 2, filter_, 0, 0)):  # no new privileges, then the filter
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
