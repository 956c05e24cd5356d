"""Power iteration that goes on when ranks die, and takes newcomers in.

    export WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 UNISONO_TOKEN=$(openssl rand -hex 32)
    for r in 0 1 2 3; do RANK=$r PAUSE_S=0.1 python examples/elastic.py & done      (kill one: kill -9 PID)
    UNISONO_JOIN=HOST:PORT python examples/elastic.py                  (an address that it prints)

`unisono run` ends all ranks when one fails, so the shell starts them here.

Each rank multiplies its rows of a matrix by the current vector. The vector is the state: all have it, and a
newcomer gets it from one of them. After each change the rows are divided among the ranks that are there.
"""

from __future__ import annotations

import os
import time

import numpy as np

import unisono as un

N, STEPS = 400, 200
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))


def matrix() -> np.ndarray:
    """The same symmetric matrix on every rank; its largest eigenvalue is near N / 2."""
    found = np.random.default_rng(1).random((N, N))
    return (found + found.T) / 2


def iterate(group: un.Group, a: np.ndarray, state: dict[str, np.ndarray], step: int) -> int:
    """One multiplication, divided among the ranks; returns the number of the next one."""
    first, last = group.rank * N // group.size, (group.rank + 1) * N // group.size
    product = np.zeros(N)
    product[first:last] = a[first:last] @ state["x"]
    group.all_reduce(product)
    state["value"] = np.array(np.linalg.norm(product))
    state["x"] = product / state["value"]
    return step + 1


def main() -> None:
    """Find the largest eigenvalue."""
    a = matrix()
    step, state = 0, {"x": np.ones(N) / np.sqrt(N), "value": np.array(0.0)}
    for group in un.elastic():
        with group:
            for one in group.left:
                print(f"rank {group.rank}: former rank {one.rank} {one.why}, {one.last_seen}", flush=True)
            latest = np.argmax(group.all_gather_object(step))  # a rank may have missed the last step
            step, state = group.broadcast_object((step, state), int(latest))
            if group.rank == 0:
                addresses = " ".join(group.listen())
                print(
                    f"generation {group.generation}: {group.size} ranks, listening at {addresses}", flush=True
                )
            else:
                group.listen()
            while step < STEPS:
                step = iterate(group, a, state, step)
                time.sleep(PAUSE_S)
                if step % 10 == 0 and group.waiting():
                    break
    expected = np.abs(np.linalg.eigvalsh(a)).max()
    assert np.isclose(state["value"], expected), (state["value"], expected)
    print(f"the largest eigenvalue is {float(state['value']):.6f}", flush=True)


if __name__ == "__main__":
    main()
