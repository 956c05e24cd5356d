"""Where a message goes, and where it comes from."""

from __future__ import annotations

from unisono.mpi import constants
from unisono.mpi.comm_state import CommState
from unisono.mpi.constants import ANY_SOURCE, ANY_TAG
from unisono.mpi.errors import Exception, whole
from unisono.mpi.transport import MOST_TAG


def destination(state: CommState, dest: int, tag: int) -> tuple[int, int]:
    """The rank of the world and the tag of a message to a rank.

    Raises:
        Exception: there is no such rank, or no such tag.
    """
    if type(dest) is not int or type(tag) is not int:
        dest, tag = whole(dest, "dest"), whole(tag, "tag")
    if not 0 <= dest < len(state.peers):
        raise Exception(constants.ERR_RANK, f"dest is {dest}, expected 0..{len(state.peers) - 1}")
    if not 0 <= tag <= MOST_TAG:
        raise Exception(constants.ERR_TAG, f"tag is {tag}, expected 0..{MOST_TAG}")
    return state.peers[dest], tag


def origin(state: CommState, source: int, tag: int) -> tuple[int | None, int]:
    """The rank of the world (None: any) and the tag of a message from a rank.

    Raises:
        Exception: there is no such rank, or no such tag.
    """
    if type(source) is not int or type(tag) is not int:
        source, tag = whole(source, "source"), whole(tag, "tag")
    if source != ANY_SOURCE and not 0 <= source < len(state.peers):
        raise Exception(constants.ERR_RANK, f"source is {source}, expected 0..{len(state.peers) - 1}")
    if tag != ANY_TAG and not 0 <= tag <= MOST_TAG:
        raise Exception(constants.ERR_TAG, f"tag is {tag}, expected 0..{MOST_TAG}")
    peer = None if source == ANY_SOURCE else state.peers[source]
    return peer, tag


def check_root(root: int, size: int) -> int:
    """Check the number of a root.

    Raises:
        Exception: there is no such rank.
    """
    if type(root) is not int:
        root = whole(root, "root")
    if not 0 <= root < size:
        raise Exception(constants.ERR_ROOT, f"root is {root}, expected 0..{size - 1}")
    return root
