"""A job of four ranks whose calls are recorded: overlap, a subgroup, messages, compute."""

import time

import numpy as np

import unisono as un


def main() -> None:
    with un.init_process_group() as group:
        x = np.ones(1 << 16, np.float32)
        half = group.subgroup((0, 1)) or group.subgroup((2, 3))
        if group.rank < 2:
            group.subgroup((2, 3))
        assert half is not None
        for _ in range(2):
            begun = time.process_time()
            while time.process_time() - begun < 0.005:
                pass
            work = group.all_reduce(x, algorithm="ring", async_op=True)
            half.all_gather(x[:1024])
            work.wait()
        if group.rank == 0:
            group.send(x[:100], 1)
        elif group.rank == 1:
            group.recv(x[:100], 0)
        elif group.rank == 2:
            un.wait_all(group.batch([un.RecvFrom(x[:10], 3)]))
        else:
            group.isend(x[:10], 2).wait()
        group.barrier()


if __name__ == "__main__":
    main()
