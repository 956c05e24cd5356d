"""A sandbox around this process: seccomp refuses a system call."""

import ctypes
import os
import struct

import system

SYSCALLS = {"x86_64": {"read": 310, "write": 311}, "aarch64": {"read": 270, "write": 271}}


def refuse(what: str) -> None:
    """Make the system refuse this process a copy from or to another one, as a sandbox does.

    what: "read" or "write".
    """
    if system.why_not("other processes"):
        return  # it refuses both already
    number = SYSCALLS[os.uname().machine][what]
    load, jump, back = 0x20, 0x15, 0x06  # of the number; equal to; return
    program = struct.pack("HBBI", load, 0, 0, 0) + struct.pack("HBBI", jump, 0, 1, number)
    program += struct.pack("HBBI", back, 0, 0, 0x00050001) + struct.pack("HBBI", back, 0, 0, 0x7FFF0000)
    code = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((38, 1, 0, 0, 0), (22, 2, filter_, 0, 0)):  # no new privileges, then the filter
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
