"""Every rank sends arrays that others can read and such that they cannot."""

import mmap
import os

import numpy as np

import unisono as un

group = un.init_process_group(init_method=os.environ["MEETING"])
p, rank = group.size, group.rank
right, left = (rank + 1) % p, (rank - 1) % p


def given(numel: int, kind: str) -> np.ndarray:
    if kind == "ordinary":
        return np.zeros(numel, np.float32)
    # Memory that this process may write only: other processes cannot read it, as that of a device.
    return np.frombuffer(mmap.mmap(-1, 4 * numel, prot=mmap.PROT_WRITE), np.float32)


for kind in ("ordinary", "closed"):
    for numel in (1000, 70_001, 1_100_001):
        x, got = given(numel, kind), given(numel, kind)
        x[:] = np.arange(numel) + rank
        status = group.sendrecv(x, right, got, left)
        assert status == left
        assert (got == np.arange(numel) + left).all(), (kind, numel)
        out = given(p * numel, kind).reshape(p, numel)
        group.all_gather(out, x)
        assert all((out[r] == np.arange(numel) + r).all() for r in range(p)), (kind, numel)
        group.all_to_all(got := given(p * numel, kind).reshape(p, numel), out)
        assert all((got[r] == np.arange(numel) + rank).all() for r in range(p)), (kind, numel)
        group.broadcast(x, src=p - 1)
        assert (x == np.arange(numel) + p - 1).all(), (kind, numel)
        if p == 2:  # both send first
            group.send(x + rank, right)
            group.recv(got[0], left)
            assert (got[0] == np.arange(numel) + p - 1 + left).all(), (kind, numel)
print("done")
