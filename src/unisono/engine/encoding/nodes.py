"""The kinds of nodes in a message, and the limits of both sides."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["INT64_MAX", "INT64_MIN", "LARGE_NBYTES", "MAX_DEPTH", "NodeKind"]

LARGE_NBYTES = 4096
"""Byte strings of at least this size get their own, aligned place after everything else."""

MAX_DEPTH = 1000
"""The nesting of containers. Deeper objects fail elsewhere: when compared, hashed or printed."""

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1


class NodeKind(IntEnum):
    """A node's kind. The comment lists the values it uses, in order; for bytes the value is their length.

    Nodes are in preorder: a container before its items.
    """

    VALUE = 0  # the value itself: None, bool, int of 64 bits, float, str
    RUN = 1  # n: the next n nodes would all be VALUE
    LIST = 2  # n; then n nodes
    TUPLE = 3
    SET = 4
    FROZENSET = 5
    DICT = 6  # n; then 2n nodes: key, value, key, value ...
    INT = 7  # bytes: two's complement
    TEXT = 8  # bytes: UTF-8, surrogates as they come
    BYTES = 9  # bytes
    BYTEARRAY = 10
    COMPLEX = 11  # real, imaginary
    ARRAY = 12  # elements, number of dimensions, dimensions, bytes in C order
    ARRAY_F = 13  # the same, in Fortran order
    SCALAR = 14  # elements, bytes
    RECORD = 15  # class, n, n names; then n nodes: the fields of a dataclass or Struct
    ENUM = 16  # class, name
    FLAG = 17  # class; then one node: its number
