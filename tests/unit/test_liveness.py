"""What a rank takes for the launcher's status board."""

import os
import tempfile

from unisono.commands.launch.process import StatusBoard
from unisono.engine.bootstrap.liveness import board


def test_the_status_board_is_known_by_its_inode_and_its_seals() -> None:
    made = StatusBoard(2)
    fd, inode = map(int, made.name.split(":"))
    assert fd == made.fd
    assert board((fd, inode)) == fd
    assert board((fd, inode + 1)) == board(None) == -1
    memory = os.memfd_create("not sealed")
    with tempfile.TemporaryFile() as file:
        for other in (file.fileno(), memory):
            assert board((other, os.fstat(other).st_ino)) == -1
    os.close(memory)
    made.close()
    assert board((fd, inode)) == -1
