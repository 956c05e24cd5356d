"""Algorithms as a user writes them, one right and two wrong. Given to `unisono draw` by test_drawing.py."""

from unisono.plans import Out, Recv, Reduce, Send


def pass_on(rank, size, root):
    if rank == 0:
        yield Reduce(Out(0), frm=tuple(range(size)))
    else:
        yield Send(Out(0), to=(0,))
        yield Recv(Out(0), frm=rank - 1)
    if rank + 1 < size:
        yield Send(Out(0), to=(rank + 1,))


def forgetful(rank, size, root):
    yield Send(Out(0), to=((rank + 1) % size,))


def broken(rank, size, root):
    yield 1 // rank
