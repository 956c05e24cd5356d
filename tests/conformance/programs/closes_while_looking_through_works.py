"""A handler closes the group while it looks through its works."""

import contextlib
import os
import signal

import numpy as np

import inside
import unisono as un


class Work:
    """Sends the signal when the group asks whether it has ended."""

    def ended(self) -> bool:
        os.kill(os.getpid(), signal.SIGUSR1)
        return True

    def retain_buffers(self) -> None:
        pass


group = un.init_process_group(init_method=os.environ["MEETING"])
signal.signal(signal.SIGUSR1, lambda *_: group.close())
inside.keep(group, Work())
with contextlib.suppress(un.UnisonoError):
    group.isend(np.ones(1), 0)
    group.irecv(np.ones(1), 0, tag=1)
print(group.closed)
